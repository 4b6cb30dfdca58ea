"""What `tilewise serve` adds to transformers' handling of requests: sampling for each request, and OpenAI's errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

# What would change the answer, and continuous batching does not have; None, 0 and empty values ask for nothing.
NOT_SERVED = ("frequency_penalty", "presence_penalty", "logit_bias", "stop", "logprobs", "top_logprobs", "suffix")

_asked: ContextVar[Any] = ContextVar("asked")  # the generation config of the request that this task handles


def read_requests(*handlers: Any) -> None:
    """Makes handlers check the sampling parameters of a request, and keep them for `sampling_of_request`."""
    for handler in handlers:
        handler._build_generation_config = _checked(handler._build_generation_config)


def _checked(build: Callable[..., Any]) -> Callable[..., Any]:
    def build_generation_config(body: dict[str, Any], model_config: Any, use_cb: bool = False) -> Any:
        _check(body)
        config = build(body, model_config, use_cb=use_cb)
        if (most := body.get("max_completion_tokens")) is not None:  # OpenAI's newer name of max_tokens
            config.max_new_tokens = most
        temperature, top_p = body.get("temperature"), body.get("top_p")
        if temperature != 0 and (temperature is not None or top_p is not None):
            config.do_sample = True  # transformers leaves this to the model's own config
        _asked.set(config)
        return config

    return build_generation_config


def _check(body: dict[str, Any]) -> None:
    for name, low, high in (("temperature", 0, 2), ("top_p", 0, 1)):
        value = body.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and low <= value <= high):
            raise refusal(name, value, f"a number from {low} to {high}")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if value is not None and not (type(value) is int and value > 0):
            raise refusal(name, value, "a positive integer")
    if body.get("n") not in (None, 1):
        raise refusal("n", body["n"], "1")
    for name in NOT_SERVED:
        if body.get(name):
            raise refusal(name, body[name], "none: continuous batching does not have it")


def refusal(name: str, given: Any, expected: str) -> Exception:
    """An error of HTTP about an argument of a request."""
    from fastapi import HTTPException

    error: Any = HTTPException(400, f"{name}: got {given!r}, expected {expected}")
    error.param = name
    return error


def for_all_sampling(config: Any) -> Any:
    """A generation config from which continuous batching makes all processors that take a number for each request."""
    config = copy.deepcopy(config)
    config.do_sample, config.temperature, config.top_k, config.top_p = True, 0.5, 2, 0.5
    return config


def sampling_of_request(vocabulary: int) -> dict[str, Any]:
    """The numbers of these processors for the request that this task handles; greedy is the likeliest token alone."""
    config = _asked.get()
    if not config.do_sample:
        return {"temperature": 1.0, "top_k": 1, "top_p": 0.0}
    top_p, top_k = config.top_p, config.top_k
    return {
        "temperature": float(1.0 if config.temperature is None else config.temperature),
        "top_k": min(top_k or vocabulary, vocabulary),
        "top_p": float(1.0 if top_p is None else top_p),
    }


def openai_errors(app: Any) -> None:
    """Errors of an application in OpenAI's shape, which its clients read."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from starlette.exceptions import HTTPException
    from transformers.cli.serving.utils import CBWorkerDeadError

    def answer(status: int, message: str, param: str | None = None) -> JSONResponse:
        kind = "invalid_request_error" if status < 500 else "server_error"
        error = {"message": message, "type": kind, "param": param, "code": None}
        return JSONResponse({"error": error}, status)

    async def of_http(_: Any, error: Any) -> JSONResponse:
        return answer(error.status_code, str(error.detail), getattr(error, "param", None))

    async def of_body(_: Any, error: Any) -> JSONResponse:
        first = error.errors()[0]
        return answer(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")

    async def of_worker(_: Any, error: Exception) -> JSONResponse:
        return answer(503, str(error))

    async def of_server(_: Any, error: Exception) -> JSONResponse:
        return answer(500, f"{type(error).__name__}: {error}")

    for kind, handle in (
        (HTTPException, of_http),
        (RequestValidationError, of_body),
        (CBWorkerDeadError, of_worker),
        (Exception, of_server),
    ):
        app.add_exception_handler(kind, handle)

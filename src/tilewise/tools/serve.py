"""`tilewise serve`: transformers' OpenAI-compatible server with attention by tilewise.

HTTP, scheduling, continuous batching and sampling are transformers'. tilewise is the attention that it loads by name
(`compat.transformers.register_flash`). In addition, a prompt that cannot fit is refused (transformers would wait
forever), each request has sampling parameters of its own (transformers takes the first request's for all), errors have
OpenAI's shape, /v1/models names the model that is served, and stopping leaves no thread behind.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ..core.extras import need
from ..errors import InvalidArgument
from .pretrained import converted, smollm2_file
from .serve_requests import for_all_sampling, openai_errors, read_requests, refusal, sampling_of_request

PAGE = 256  # tokens, transformers' default
GRACE = 3  # seconds for running requests when the server stops


def serve(model: str | None, host: str, port: int, attention: str, tokens: int, device: str, dtype: str) -> int:
    """Serves until it is interrupted; returns the exit status.

    Args:
        model: a folder, or the name of a repository on the hub; None is SmolLM2.
        attention: `"tilewise"`, or an implementation of transformers to compare with.
        tokens: capacity of the cache of continuous batching.
    """
    need("serve", "transformers", "fastapi", "uvicorn", "kernels", "psutil", by="tilewise serve")
    _check(model, host, port, device, dtype)
    name = str(converted(smollm2_file())) if model is None else model
    from transformers.cli.serve import Serve

    from ..compat.transformers import register_flash

    batchers: list[Any] = []

    class Server(Serve):  # type: ignore[misc]
        def start_server(self) -> None:
            """Called once, when the model has been loaded."""
            (loaded,) = self._model_manager.loaded_models.values()
            _wrap_batching(loaded.model, tokens, batchers)
            # /v1/models: the one that is served. transformers lists the hub's cache, and fails if there is none.
            served = {"id": name, "object": "model", "created": int(time.time()), "owned_by": ""}
            self._model_manager.get_gen_models = lambda cache_dir=None: [served]
            read_requests(self._chat_handler, self._completion_handler, self._response_handler)
            openai_errors(self.server.config.app)
            self.server.config.timeout_graceful_shutdown = GRACE
            super().start_server()

    try:
        running = Server(
            force_model=name,
            continuous_batching=True,
            attn_implementation=register_flash() if attention == "tilewise" else attention,
            cb_num_blocks=-(-tokens // PAGE),
            device=device,
            dtype=dtype,
            host=host,
            port=port,
            non_blocking=True,
        )
    except OSError as error:  # from loading the model
        reason = str(error).strip().split("\n")[0]
        raise InvalidArgument(
            "model", name, "a folder, or the name of a model that can be downloaded from the hub", reason
        ) from error
    print(f"model {name!r} at http://{host}:{port}/v1, attention by {attention}; Ctrl-C stops it", file=sys.stderr)
    try:
        running._thread.join()
    finally:
        running.server.should_exit = True
        running._thread.join(2 * GRACE)
        for batcher in batchers:
            batcher.stop(hard_stop=True)  # drops its requests, waits for the current step
        running.reset_loaded_models()
    return 0 if running.server.started else 1  # uvicorn has said why


def _check(model: str | None, host: str, port: int, device: str, dtype: str) -> None:
    """Checks the arguments before the model is loaded."""
    if model is not None:
        folder = Path(model)
        is_path = folder.is_absolute() or model.startswith(".") or len(folder.parts) > 2  # the hub has OWNER/NAME
        if not (folder / "tokenizer_config.json").is_file() if folder.is_dir() else is_path:
            raise InvalidArgument("model", model, "a folder with a model and its tokenizer, as transformers saves them")
    if dtype != "auto" and not getattr(getattr(torch, dtype, None), "is_floating_point", False):
        raise InvalidArgument("dtype", repr(dtype), "'auto' or a dtype of torch, such as 'bfloat16'")
    try:
        torch.empty(0, device="cpu" if device == "auto" else device)  # transformers then chooses
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        want = "'auto' or a device that torch has here, such as 'cpu'"
        raise InvalidArgument("device", repr(device), want, reason) from error
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InvalidArgument("port", f"{port} of {host}", "a free port", f"{reason}; use another --port") from error


def _wrap_batching(model: Any, tokens: int, batchers: list[Any]) -> None:
    """Refuses prompts that exceed the model or the cache, limits answers to the room that is left, and gives each
    request its own sampling.
    """
    text_config = model.config.get_text_config(decoder=True)
    room = min(tokens, text_config.max_position_embeddings)
    make = model.init_continuous_batching

    def init_continuous_batching(*, generation_config: Any, continuous_batching_config: Any) -> Any:
        continuous_batching_config.per_request_processors = True
        shared = for_all_sampling(generation_config)
        batcher = make(generation_config=shared, continuous_batching_config=continuous_batching_config)
        add = batcher.add_request

        def add_request(input_ids: list[int], *rest: Any, max_new_tokens: int | None = None, **more: Any) -> Any:
            if len(input_ids) >= room:
                raise refusal("messages", f"{len(input_ids)} tokens", f"at most {room}")
            most = batcher.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
            left = room - len(input_ids)
            more |= sampling_of_request(text_config.vocab_size)
            return add(input_ids, *rest, max_new_tokens=left if most is None else min(most, left), **more)

        batcher.add_request = add_request
        batchers.append(batcher)
        return batcher

    model.init_continuous_batching = init_continuous_batching

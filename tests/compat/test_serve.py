"""`tilewise serve` end to end on loopback, by OpenAI's client: the texts are those of eager attention.

Needs the extra [serve], which `make test` does not install: `make test-serve` has an environment of its own.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
import tiny_chat
from tilewise.core.extras import MissingPackage
from tilewise.errors import InvalidArgument
from tilewise.tools import cli, pretrained, serve

openai = pytest.importorskip("openai", reason="the extra [serve]")
pytest.importorskip("fastapi", reason="the extra [serve]")

STARTS = 900  # seconds, on a machine with much else to do
ROOM = 1024  # tokens in the cache
QUESTIONS = (
    "What is the capital of France?", "Name a colour.", "What is 2 + 2?", "Say hello.",
    "Who wrote Hamlet?", "Is water wet?", "Name three animals, and say what each of them eats.", "What is a prime?",
)  # fmt: skip


@contextmanager
def served(folder, log):
    """A server in a process of its own: its port and process. Stopped by SIGTERM if it is still there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--tokens", str(ROOM)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, "-m", "tilewise", *words], stdout=out, stderr=out, env=env)
    try:
        end = time.monotonic() + STARTS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield port, process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STARTS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def client_of(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=STARTS, max_retries=0)


def asked(client, folder, question, most, stream=True):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model=str(folder), messages=messages, stream=stream, temperature=0, max_tokens=most
    )


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def eager(folder, questions, most):
    """The texts by transformers alone, one by one."""
    model, tokenizer = pretrained.causal_lm(folder)
    model.set_attn_implementation("eager")
    texts = []
    for question in questions:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        with torch.inference_mode():
            made = model.generate(**inputs, max_new_tokens=most, do_sample=False)
        texts.append(tokenizer.decode(made[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def vanish(port, folder, question):
    """Asks, reads the beginning of the answer and is gone: the connection is reset."""
    messages = [{"role": "user", "content": question}]
    body = json.dumps({"model": str(folder), "stream": True, "temperature": 0, "max_tokens": 500, "messages": messages})
    with socket.create_connection(("127.0.0.1", port), timeout=STARTS) as peer:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        peer.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        assert b"200 OK" in peer.recv(200)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def sampled_and_refused(client, folder, most, greedy):
    """Each request has its own sampling, also beside others, and says what it cannot have."""

    def ask(**options):
        messages = [{"role": "user", "content": QUESTIONS[1]}]
        return client.chat.completions.create(
            model=str(folder), messages=messages, max_completion_tokens=most, **options
        )

    def text(options):
        return ask(**options).choices[0].message.content

    cases = [{"temperature": 0}, {"temperature": 2}, {"temperature": 1.7}, {}, {"temperature": 1.9, "top_p": 0}]
    with ThreadPoolExecutor(len(cases)) as threads:
        texts = list(threads.map(text, cases))
    assert texts[0] == texts[3] == texts[4] == greedy
    assert greedy not in texts[1:3]
    assert text({"temperature": 1.5, "seed": 3}) == text({"temperature": 1.5, "seed": 3}) != greedy
    for name, value in (
        ("temperature", 2.5), ("temperature", "hot"), ("top_p", -1), ("n", 2), ("stop", ["a"]), ("presence_penalty", 1),
        ("logit_bias", {"5": 9}), ("max_tokens", 0),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as refused:
            ask(**{name: value}) if name != "max_tokens" else asked(client, folder, "Hello.", 0)
        assert refused.value.body == {
            "message": refused.value.body["message"], "type": "invalid_request_error", "param": name, "code": None,
        }  # fmt: skip
        assert refused.value.body["message"].startswith(f"{name}: got ")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="another", messages=[])
    assert "another" in refused.value.body["message"]
    with pytest.raises(openai.NotFoundError) as refused:
        client.images.generate(prompt="a cat")
    assert refused.value.type == "invalid_request_error"


def check(folder, log, most):
    wanted = eager(folder, QUESTIONS, most)
    assert len(set(wanted)) > 1
    with served(folder, log) as (port, process), client_of(port) as client:

        def ask_all():
            with ThreadPoolExecutor(len(QUESTIONS)) as threads:
                return list(threads.map(lambda q: text_of(asked(client, folder, q, most)), QUESTIONS))

        assert [model.id for model in client.models.list()] == [str(folder)]
        assert ask_all() == wanted
        assert asked(client, folder, QUESTIONS[1], most, stream=False).choices[0].message.content == wanted[1]
        stream = asked(client, folder, "Count to a hundred.", 500)
        next(iter(stream))
        stream.close()  # cancelled in the middle
        vanish(port, folder, "Tell me a long story.")
        with pytest.raises(openai.BadRequestError) as refused:
            asked(client, folder, "word " * 2 * ROOM, most)
        assert refused.value.param == "messages"
        assert f"at most {ROOM}" in refused.value.body["message"]
        sampled_and_refused(client, folder, most, wanted[1])
        assert ask_all() == wanted  # whatever else there was
        stream = asked(client, folder, "Tell me another long story.", 900)
        next(iter(stream))
        process.send_signal(signal.SIGTERM)  # with an answer under way
        assert process.wait(STARTS) == 128 + signal.SIGTERM, log.read_text()
    said = log.read_text()
    assert "attention by tilewise" in said
    assert "Traceback" not in said.replace("asyncio.exceptions.CancelledError", "")


def test_a_tiny_model(tmp_path):
    check(tiny_chat.save(tmp_path / "model"), tmp_path / "log", 24)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/folder"], "model: got /no/such/folder, expected a folder"),
        (["FOLDER"], "model: got"),
        (["--dtype", "float99"], "dtype: got 'float99'"),
        (["--dtype", "int8"], "dtype: got 'int8'"),
        (["--device", "cuda:99"], "device: got 'cuda:99'"),
        (["--device", "abacus"], "device: got 'abacus'"),
        (["--host", "127.0.0.1", "--port", "PORT"], "expected a free port"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_told_at_once(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(serve, "converted", lambda file: pytest.fail("weights are read before all is checked"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = {"FOLDER": str(tmp_path), "PORT": str(taken.getsockname()[1])}
        assert cli.main(["serve", *(given.get(word, word) for word in words)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_smollm2(tmp_path):
    try:
        folder = pretrained.converted(pretrained.smollm2_file())
    except (MissingPackage, InvalidArgument) as error:
        pytest.skip(str(error))
    check(Path(folder), tmp_path / "log", 16)

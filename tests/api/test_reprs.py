"""What a notebook or a debugger shows of a value: one line, and a picture where there is one."""

from xml.etree import ElementTree

import pytest
import torch

from tilewise import Quantised, TileMap, plan
from tilewise.core.tile_pictures import COLOURS

Q = torch.randn(1, 8, 1024, 64)
CAUSAL = TileMap.from_spec(1024, 1024, causal=True)
VALUES = {
    "<Plan cpu: prefill": plan(Q, Q, Q, causal=True, window=128, backend="cpu"),
    "<TileMap 1024 x 1024 in tiles of 64 x 64, states [1, 1, 16, 16], of rules>": CAUSAL,
    "<TileMap 70 x 90 in tiles of 64 x 64, states [1, 3, 2, 2], of a float mask>": TileMap.from_mask(
        torch.zeros(3, 70, 90)
    ),
    "<TileMap 4 x 8 in tiles of 2 x 2, states [1, 1, 2, 4], of chosen blocks>": TileMap.from_blocks(
        torch.tensor([[[0, -1], [1, 3]]]), 2, 4, 8
    ),
    "<Quantised [1, 8, 1024, 64] int8, groups of 64, on cpu>": Quantised.from_float(Q, "int8"),
}


@pytest.mark.parametrize("start", VALUES, ids=lambda start: start.split()[0][1:])
def test_a_repr_is_one_short_line(start):
    shown = repr(VALUES[start])
    assert shown.startswith(start)
    assert len(shown) < 120
    assert "\n" not in shown


def parsed(html):
    return ElementTree.fromstring(f"<body>{html.replace('&#9632;', '')}</body>")


@pytest.mark.parametrize("value", [CAUSAL, *[x for x in VALUES.values() if isinstance(x, TileMap)]], ids=repr)
def test_the_picture_of_a_map_has_its_tiles(value):
    """Areas of each colour are the tiles of that state in the first plane."""
    svg = parsed(value._repr_html_()).find("{*}svg")
    area = dict.fromkeys(COLOURS, 0)
    for shape in svg.findall("{*}rect")[1:]:  # the first is the ground
        area[shape.get("fill")] += int(shape.get("width")) * int(shape.get("height"))
    counts = TileMap(value.states[:1, :1], value.tile, value.shape).counts()
    assert (area[COLOURS[1]], area[COLOURS[2]]) == (counts.mixed, counts.full)
    assert str(value).splitlines()[0] in "".join(parsed(value._repr_html_()).itertext())


def test_a_large_map_has_a_small_picture():
    large = TileMap.from_spec(65536, 65536, (64, 64), causal=True, window=5000)
    assert len(large._repr_html_()) < 30_000
    empty = TileMap.from_mask(torch.ones(0, 4).bool())
    assert parsed(empty._repr_html_()).find("{*}svg") is not None


def test_a_plan_is_shown_as_its_text_and_the_share_of_its_tiles():
    value = VALUES["<Plan cpu: prefill"]
    shown = parsed(value._repr_html_())
    assert shown.find("pre").text == str(value)
    widths = [float(x.get("width")) for x in shown.find("{*}svg").findall("{*}rect")[1:]]
    tiles = value.cost.tiles
    assert widths == pytest.approx([100 * n / sum(tiles) for n in tiles], abs=1e-2)

"""Whole calls drawn by hypothesis."""

from hypothesis import strategies as st

from tilewise.testing.drawing import draw_case, draw_change


class Drawn:
    """Choices that hypothesis makes, and shrinks."""

    def __init__(self, draw):
        self.draw = draw

    def pick(self, values):
        return self.draw(st.sampled_from(values))

    def number(self, low, high):
        return self.draw(st.integers(low, high))


@st.composite
def cases(draw, **limits):
    """A `Case`; `limits` are those of `draw_case`."""
    return draw_case(Drawn(draw), **limits)


@st.composite
def changes(draw, **limits):
    """A `Case` and the same shapes with another value of one option."""
    chooser = Drawn(draw)
    case = draw_case(chooser, **limits)
    return case, draw_change(chooser, case)

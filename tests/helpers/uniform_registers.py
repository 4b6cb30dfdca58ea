"""Uniform registers that a loop of machine code may read from an earlier turn, though it does not always write them.

ptxas 12.8 takes descriptors of products that stand in a branch from registers that only the other branch has written:
the products then read other shared memory, or none.
"""

from __future__ import annotations

import re

PAIRS = ("UIMAD.WIDE", "ULDC.64", "UIADD3.64", "UMOV.64")  # write two registers


def instructions(sass: str) -> tuple[list[str], dict[str, int]]:
    """The code, and where its labels stand."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"^(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(found[1].strip())
    return code, labels


def successors(code: list[str], labels: dict[str, int]) -> list[list[int]]:
    found = []
    for i, text in enumerate(code):
        plain = re.sub(r"^@!?U?P\w+\s+", "", text)
        goes = re.search(r"\((\.L_x_\d+)\)", plain) if plain.startswith("BRA") else None
        ends = plain.startswith(("BRA", "EXIT", "BRX", "RET"))
        conditional = text.startswith("@") or re.match(r"BRA(\.\w+)* !?U?P", plain) is not None
        to = [labels[goes[1]]] if goes and goes[1] in labels else []
        found.append([x for x in (to + [i + 1] * (not ends or conditional)) if x < len(code)])
    return found


def written_and_read(text: str) -> tuple[set[int], set[int]]:
    """The numbers of uniform registers."""
    conditional = text.startswith("@")
    op, _, rest = re.sub(r"^@!?U?P\w+\s+", "", text).partition(" ")
    written: set[int] = set()
    first, _, others = rest.partition(",")
    if (own := re.match(r"UR(\d+)$", first.strip())) and op.startswith(("U", "R2UR", "S2UR")):
        written = {int(own[1]) + n for n in range(2 if op.startswith(PAIRS) else 1)}
        rest = others
    read = {int(n) + k for n in re.findall(r"gdesc\[UR(\d+)\]", rest) for k in range(4)}
    read |= {int(n) for n in re.findall(r"UR(\d+)", rest)}
    return written, read | (written if conditional else set())


def stale(sass: str) -> list[str]:
    """Instructions of loops that multiply matrices, and that read what this turn and perhaps the last did not write."""
    code, labels = instructions(sass)
    after = successors(code, labels)
    loops = [
        (to, i) for i, goes in enumerate(after) for to in goes
        if to <= i and any("GMMA" in x for x in code[to:i]) and not any("EXIT" in x for x in code[to:i])
    ]  # fmt: skip
    inner = [s for s in loops if not any(s != t and s[0] <= t[0] and t[1] <= s[1] for t in loops)]
    found = []
    for start, end in inner:
        flow = {i: written_and_read(code[i]) for i in range(start, end + 1)}
        before: dict[int, set[int]] = {start: set()}  # always written between the start and here
        work = [start]
        while work:
            i = work.pop()
            here = before[i] | flow[i][0]
            for to in after[i]:
                # Repeated waits lie behind the code, and come back to where they were called.
                if start < to <= end and (to not in before or not before[to] <= here):
                    before[to] = before[to] & here if to in before else set(here)
                    work.append(to)
        somewhere = set().union(*(w for w, _ in flow.values()))
        whole = before[end] | flow[end][0]  # each turn writes these
        found += [code[i] for i in before if (flow[i][1] - before[i]) & (somewhere - whole)]
    return found

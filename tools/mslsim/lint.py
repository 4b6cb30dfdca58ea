"""Reads MSL with clang: C++14, real address spaces, and only those functions of Metal that its specification lists.

The simulator executes what a text means and is generous about how it is written; this is what Apple's compiler would
refuse, as far as it is known: a pointer that changes or loses its address space, a write to constant memory, a lambda
(Metal 3.2), `if constexpr` (C++17), a function that Metal does not have or has for other types only.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import clang.cindex as clang

from mslsim.build import NAME
from mslsim.text import check_ascii, line_of, without_comments

_HEADER = Path(__file__).with_name("lint.h")
_FLAGS = (
    "-x c++ -std=c++14 -pedantic-errors -Wall -Wextra -Wc++98-compat -ferror-limit=0 "
    "-target x86_64-linux-gnu -nostdinc -fsigned-char "
    "-Wno-unknown-attributes -Wno-unused -Wno-unused-parameter -Wno-sign-compare -Wno-gnu-line-marker "
    "-Wno-reserved-user-defined-literal -Wno-undefined-internal -Wno-undefined-inline -Wno-missing-field-initializers"
).split()
_INCLUDE = re.compile(r"^[ \t]*#include[^\n]*", re.MULTILINE)  # Metal's headers are ours here
# A variable of an address space cannot live on the stack: it is made static.
_SHARED = re.compile(r"\bthreadgroup\s+([\w:]+\s*(?:<[^;{}()]*>)?\s+\w+\s*(?:\[[^;]*|,[^;]*)?;)")
_CONSTANT = re.compile(r"\b(?:const|constexpr)\s+constant\b|\bconstant\s+(?:const|constexpr)\b")
# Clang's vectors here are classes, whose assignment takes no address space: a function stands for it.
_STORED = re.compile(r"\*\(((?:threadgroup|device) \w+\*)\)\(([^;=]*)\) = ([^;]*);")
# Clang takes no attributes in an explicit instantiation.
_INSTANCE = re.compile(r'(\btemplate\s*)\[\[\s*host_name\("\w+"\)\s*\]\]\s*(?:\[\[\s*kernel\s*\]\]|\bkernel)')
_DOUBLE = re.compile(r"\bdouble\b")
_LAMBDA = "lambda expressions are incompatible with C++98"


@dataclass(frozen=True)
class Complaint:
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


@cache
def _index() -> clang.Index:
    return clang.Index.create()


def _parsed(source: str, defines: tuple[str, ...]) -> list[Complaint]:
    text = _INCLUDE.sub("", source)
    text = _SHARED.sub(r"static threadgroup \1", text)
    text = _CONSTANT.sub("constant", text)
    text = _INSTANCE.sub(r"\1", text)
    text = _STORED.sub(r"metal::lint_stored((\1)(\2), \3);", text)
    unit = _index().parse(
        NAME, args=[*_FLAGS, "-include", str(_HEADER), *(f"-D{d}" for d in defines)], unsaved_files=[(NAME, text)]
    )
    return [*(c for d in unit.diagnostics if (c := _complaint(d))), *_casts(unit.cursor)]


def _casts(cursor: clang.Cursor) -> Iterator[Complaint]:
    """Casts from one address space to another, which clang allows and Metal does not."""
    kinds = clang.CursorKind.CSTYLE_CAST_EXPR, clang.CursorKind.CXX_REINTERPRET_CAST_EXPR
    for node in cursor.walk_preorder():
        if node.kind not in kinds or node.type.kind != clang.TypeKind.POINTER:
            continue
        given = [c.type for c in node.get_children() if c.type.kind == clang.TypeKind.POINTER]
        wanted = node.type.get_pointee().get_address_space()
        if given and given[-1].get_pointee().get_address_space() != wanted:
            yield Complaint(node.location.line, f"a cast to another address space: {node.type.spelling}")


def _complaint(d: clang.Diagnostic) -> Complaint | None:
    if d.severity < clang.Diagnostic.Warning:
        return None
    if d.option.startswith("-Wc++98-compat"):  # asked for because it tells of lambdas, which nothing else does
        return Complaint(d.location.line, "a lambda: needs Metal 3.2") if d.spelling.startswith(_LAMBDA) else None
    # Clang knows no constructors of objects in an address space; threadgroup variables have none to call.
    if d.spelling.startswith("no matching constructor for initialization of 'threadgroup "):
        return None
    return Complaint(d.location.line, d.spelling)


def lint(source: str, *, mixed_matrices: bool = False) -> list[Complaint]:
    """What is to be said against a text; nothing if it is well."""
    try:
        check_ascii(source)
    except SyntaxError as e:
        line, _, text = str(e).removeprefix("line ").partition(": ")
        return [Complaint(int(line), text)]
    bare = without_comments(source)
    found = [Complaint(line_of(bare, m.start()), "Metal has no double") for m in _DOUBLE.finditer(bare)]
    found += _parsed(source, ("MSLSIM_MIXED_MATRICES",) if mixed_matrices else ())
    return sorted(found, key=lambda c: c.line)

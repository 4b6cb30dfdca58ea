"""Collects every message of tilewise into one page: `python tools/messages.py` writes docs/messages.md.

Messages are read from the source by its syntax tree: errors as they would print, warnings, and every other string of
three words or more (reasons of `plan`, lines of `doctor`, help of commands). A name in braces stands for its value. A
text that a local name or a constant of the module holds is put in its place; of two alternatives both are shown.
`tests/project/test_messages.py` compares the page with what this makes.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "tilewise"
PAGE = ROOT / "docs" / "messages.md"
HEAD = """# Every message

What tilewise says when it refuses, warns or explains, module by module. `python tools/messages.py` writes this page
from the source. A name in braces stands for its value; `a / b` are alternatives.
"""
# Modules whose longer strings are text of programs, not words for people.
PROGRAMS = re.compile(
    r"backends/(cpu/(codegen|mainloop|gemm|kv_access|kv_write|params|scratch|targets)|gpu/gluon|metal/text|hopper/\w+/"
    r"|triton/(bwd/)?(?!__init__|config|spec|tuned))"
)
NO_SENTENCE = re.compile(
    r"^/(sys|proc)/|SymInt|Tensor\??\b.*->|^import |deterministic=|^[; ]*</?\w|\bfill:|prefers-color"
)
FOLDERS = {
    "": "Calls", "core": "Values of a call", "validation": "Checks of arguments", "dispatch": "Choice of a backend",
    "backends": "Backends", "kv_cache": "Caches", "compat": "Drop-ins", "distributed": "Many devices",
    "testing": "Conformance suite", "tools": "Commands",
}  # fmt: skip


class Messages(ast.NodeVisitor):
    """The messages of a module, in its order."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[str, str]] = []
        self.named: list[dict[str, ast.expr]] = [_texts(tree.body)]
        self.visit(tree)

    def text(self, node: ast.expr | None, depth: int = 0) -> str:
        """What an expression prints, with names for what is not known."""
        if node is None:
            return ""
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, depth) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            inner = self.text(node.value, depth)
            return repr(inner) if node.conversion == ord("r") and isinstance(node.value, ast.Constant) else inner
        if isinstance(node, ast.IfExp):
            a, b = self.text(node.body, depth), self.text(node.orelse, depth)
            return " / ".join(x for x in (a, b) if x)
        if isinstance(node, ast.BoolOp):
            return " / ".join(x for x in (self.text(value, depth) for value in node.values) if x)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            if isinstance(node.op, ast.Mult):
                return self.text(node.left, depth) if _is_text(node.left) else "{" + ast.unparse(node) + "}"
            if _is_text(node.left) or _is_text(node.right):
                return self.text(node.left, depth) + self.text(node.right, depth)
        if isinstance(node, ast.Name) and depth < 3:
            for scope in reversed(self.named):
                if node.id in scope:
                    return self.text(scope[node.id], depth + 1)
        return "{" + ast.unparse(node) + "}"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.named.append(_texts(list(ast.walk(node))))
        for part in node.body[1:] if ast.get_docstring(node) is not None else node.body:
            self.visit(part)
        self.named.pop()

    def visit_Module(self, node: ast.Module) -> None:
        for part in node.body[1:] if ast.get_docstring(node) is not None else node.body:
            self.visit(part)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_Module(node)  # type: ignore[arg-type]

    def visit_Assert(self, node: ast.Assert) -> None:
        """Assertions are for developers."""

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [self.text(arg) for arg in node.args if not isinstance(arg, ast.Starred)]
        whole = len(given) == len(node.args)
        by_name = {word.arg: self.text(word.value) for word in node.keywords if word.arg}
        if name == "InvalidArgument" and whole and len(given) >= 2:
            parts = [*given, *(by_name[key] for key in ("expected", "remedy") if key in by_name)]
            expected, remedy = ([*parts[2:], "", ""])[:2]
            text = f"{parts[0]}: got {parts[1]}, expected {expected}" + (f"; {remedy}" if remedy else "")
            self.found.append((name, text))
        elif name == "Unsupported" and len(given) == 3:
            who = "no backend can" if given[0] == "any" else f"backend {given[0]!r} cannot"
            self.found.append((name, f"{who} serve this call: {given[1]}; {given[2]}"))
        elif re.fullmatch(r"[A-Z]\w*(Error|Full|Lost|Package|Traceable|Untraceable|Mismatch|Refused)", name) and given:
            self.found.append((name, ", ".join(given)))
        elif name in ("warn", "_warn") and given:
            self.found.append(("warning", next((text for text in given if " " in text), given[-1])))
        else:
            self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._line(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._line(node)

    def _line(self, node: ast.expr) -> None:
        text = self.text(node)
        if (
            not NO_SENTENCE.search(text)
            and len(re.findall(r"(?<![\w.{])[a-z']{2,}(?![\w.(=])", re.sub(r"\{.*?\}", "", text))) >= 3
        ):
            self.found.append(("", text))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, (ast.JoinedStr, ast.IfExp)) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    ) or (isinstance(node, ast.BinOp) and (_is_text(node.left) or _is_text(node.right)))  # fmt: skip


def _texts(body: list[ast.AST] | list[ast.stmt]) -> dict[str, ast.expr]:
    """Names that texts are assigned to, once."""
    found: dict[str, list[ast.expr]] = {}
    for node in body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and _is_text(values[0])}


def collect() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Modules and their messages: kind and text."""
    for file in sorted(SOURCE.rglob("*.py"), key=lambda file: (len(file.relative_to(SOURCE).parts) > 1, file)):
        module = file.relative_to(SOURCE).as_posix()
        if not PROGRAMS.match(module):
            found = list(dict.fromkeys(Messages(ast.parse(file.read_text(encoding="utf-8"))).found))
            whole = [text for kind, text in found if kind]
            found = [(kind, text) for kind, text in found if kind or not any(text in other for other in whole)]
            if found:
                yield module, found


def page() -> str:
    """The text of docs/messages.md."""
    lines, folder = [HEAD], None
    for module, found in collect():
        top = module.split("/")[0] if "/" in module else ""
        if top != folder:
            folder = top
            lines.append(f"\n## {FOLDERS[top]}\n")
        lines.append(f"\n### `{module}`\n")
        for kind, text in found:
            shown = " ".join(text.split()).replace("``", "` `")
            lines.append(f"- {kind + ': ' if kind else ''}`` {shown} ``")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Every message of tilewise is on one page, docs/messages.md, which is made from the source."""

import ast
import re

import messages


def test_the_page_is_that_of_the_source():
    assert messages.PAGE.read_text(encoding="utf-8") == messages.page(), "python tools/messages.py writes it anew"


def test_messages_of_each_form_are_found():
    source = '''
"""A docstring of several words is no message."""
LIMIT = "at most so many of them"

def check(x, name):
    remedy = f"call {name} with other numbers"
    if x:
        raise InvalidArgument(name, repr(x), "a number or none at all", remedy if x else "leave it out")
    warnings.warn(f"{name} is too slow here", stacklevel=2)
    raise Unsupported("any", "there is no such thing", "take another one of them")
    return f"it has no {x}, and " + LIMIT
'''
    assert messages.Messages(ast.parse(source)).found == [
        ("", "at most so many of them"),
        ("", "call {name} with other numbers"),
        (
            "InvalidArgument",
            "{name}: got {repr(x)}, expected a number or none at all; call {name} with other numbers / leave it out",
        ),
        ("warning", "{name} is too slow here"),
        ("Unsupported", "no backend can serve this call: there is no such thing; take another one of them"),
        ("", "it has no {x}, and "),
    ]


def test_every_error_of_the_package_is_there():
    """Each `raise InvalidArgument` of a module is on the page, apart from those with the same text."""
    raised = sum(len(re.findall(r"\bInvalidArgument\($", line)) or line.count("InvalidArgument(")
                 for file in messages.SOURCE.rglob("*.py") for line in file.read_text(encoding="utf-8").splitlines()
                 if "class " not in line)  # fmt: skip
    found = sum(kind == "InvalidArgument" for _, texts in messages.collect() for kind, _ in texts)
    assert 350 < found <= raised < 1.2 * found

"""Optional packages: an error that names the missing one and the command that installs it."""

from __future__ import annotations

import importlib
import re


class MissingPackage(ImportError):
    """A package of one of tilewise's extras is not installed; the message has the command that installs it."""


def need(extra: str, *modules: str, by: str) -> None:
    """Raises `MissingPackage` unless each module can be imported; `by` is what needs them."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise MissingPackage(f"{by} needs {module} ({error}): {install_line(extra)}", name=module) from error


def install_line(extra: str) -> str:
    """The command that installs an extra. It names the packages, which works however tilewise was installed.

    >>> install_line("cli")
    "pip install 'rich>=13' (tilewise's extra [cli])"
    """
    packages = packages_of(extra)
    if not packages:
        return f"install tilewise with its extra [{extra}]"
    return f"pip install {' '.join(repr(package) for package in packages)} (tilewise's extra [{extra}])"


def packages_of(extra: str) -> list[str]:
    """The requirements of an extra, as pyproject.toml has them; none if tilewise is not installed.

    >>> packages_of("hf")
    ['transformers>=5.22']
    """
    from importlib.metadata import PackageNotFoundError, requires  # here, since it is slow to import

    try:
        lines = [line.partition(";") for line in requires("tilewise") or []]
    except PackageNotFoundError:
        return []
    wanted = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    return [package.strip() for package, _, marker in lines if wanted.search(marker)]

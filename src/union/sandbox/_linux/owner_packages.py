"""Packages of the owner that lie outside its site directories: editable installs, ``--user``.

An editable install leaves a ``.pth`` file that names a directory, or a finder module that maps
names to paths. Both are read as text here; nothing of them is executed.
"""

from __future__ import annotations

import ast
import os
import site
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["editable_paths", "user_site"]

_MAX_BYTES: Final = 1024 * 1024
_FINDERS: Final = ("__editable__", "_editable_impl_")
"""How setuptools and the ``editables`` package name the modules that map names to paths."""


def user_site() -> str | None:
    """Return the directory of ``pip install --user``, if the running Python uses it."""
    if not site.ENABLE_USER_SITE:
        return None
    path = site.getusersitepackages()
    return path if os.path.isdir(path) else None


def editable_paths(site_dirs: Iterable[str]) -> tuple[str, ...]:
    """Return the directories and files that the site directories refer to, absolute, once each.

    Left out: whatever would show a home directory or a directory of the system as a whole, and
    what belongs to another user.
    """
    found: dict[str, None] = {}
    for directory in site_dirs:
        for target in _targets(directory):
            path = os.path.normpath(os.path.join(directory, target))
            if _may_show(path):
                found[path] = None
    return tuple(found)


def _targets(directory: str) -> Iterator[str]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return
    for name in names:
        path = os.path.join(directory, name)
        if name.endswith(".pth"):
            yield from _lines(_text(path))
        elif name.endswith(".py") and name.startswith(_FINDERS):
            yield from _mapped(_text(path))


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_BYTES).decode("utf-8", "surrogateescape")
    except OSError:
        return ""


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        entry = line.strip()
        if entry and "\0" not in entry and not entry.startswith(("#", "import ", "import\t")):
            yield entry


def _mapped(source: str) -> Iterator[str]:
    """Yield the paths of ``MAPPING = {name: path}`` and of ``map_module(name, path)``."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(t, ast.Name) and t.id == "MAPPING" for t in targets):
                yield from _strings(node.value.values)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "map_module"
        ):
            yield from _strings(node.args[1:2])


def _strings(nodes: Iterable[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            path = node.value
            if os.path.isabs(path) and "\0" not in path:
                # A package is its directory; the finder of ``editables`` names a file in it.
                yield os.path.dirname(path) if path.endswith("/__init__.py") else path


def _may_show(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    if found.st_uid not in {0, os.geteuid()}:
        return False
    home = os.path.realpath(os.path.expanduser("~"))
    return not any(
        spelling.count("/") < 2 or spelling == home or home.startswith(spelling + "/")
        for spelling in (path, os.path.realpath(path))
    )

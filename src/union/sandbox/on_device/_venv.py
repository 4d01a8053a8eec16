"""The session venv: a few files in the work dir, made without running anything.

Everything in the work dir belongs to sandboxed code, so this module writes there only through the
descriptors of the work tree, and what it reads back it only compares: nothing of the venv is
executed, imported or believed by the host. What sandboxed code did to it is put right before the
next command.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._core.view import RUN_DIR
from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from union.sandbox._linux.host import Interpreter
    from union.sandbox._linux.tree import WorkTree

__all__ = ["DIRECTORY", "Venv"]

DIRECTORY: Final = ".sandbox-venv"
_MOST_BYTES: Final = 65536
_OWNER: Final = 0o700
_log = logging.getLogger("union.sandbox")

_HOOK_FILE: Final = Path(__file__).with_name("_start_hook.py")


def _files(python: Interpreter, run_dir: str) -> dict[str, str]:
    """Relative path -> content of every regular file of the venv."""
    home = os.path.dirname(python.executable)
    arguments = f"{run_dir!r}, {list(python.site_dirs)!r}"
    hook = f"import _union_sandbox; _union_sandbox.begin({arguments})\n"
    lib = f"lib/python{python.version}/site-packages"
    return {
        "pyvenv.cfg": (
            f"home = {home}\n"
            f"include-system-site-packages = {str(python.sees_system).lower()}\n"
            f"version = {python.version}\n"
            f"executable = {python.executable}\n"
        ),
        f"{lib}/_union_sandbox.pth": hook,
        f"{lib}/_union_sandbox.py": _HOOK_FILE.read_text(encoding="utf-8"),
    }


def _links(python: Interpreter) -> dict[str, str]:
    return {
        "bin/python": python.executable,
        "bin/python3": "python",
        f"bin/python{python.version}": "python",
        "lib64": "lib",
    }


class Venv:
    """The venv of one session; ``ensure()`` before each use costs a few stats."""

    def __init__(
        self,
        tree: WorkTree,
        python: Interpreter,
        *,
        owner: tuple[int, int] | None,
        run_dir: str = RUN_DIR,
    ) -> None:
        self._tree = tree
        self._python = python
        self._owner = owner
        self._files = _files(python, run_dir)
        self._links = _links(python)
        names = (*self._files, "bin/python")
        dirs = {"/".join(n.split("/")[:k]) for n in names for k in range(n.count("/") + 1)}
        self._dirs = tuple(sorted(f"{DIRECTORY}/{d}" if d else DIRECTORY for d in dirs))
        self._watched = (*self._dirs, *(f"{DIRECTORY}/{name}" for name in names))
        self._seen: tuple[tuple[int, int], ...] | None = None

    def fingerprint(self) -> object:
        """Changes whenever packages are installed or anything that starts Python changes."""
        return self._tree.fingerprint((*self._watched, *self._pth_files()))

    def _pth_files(self) -> tuple[str, ...]:
        site = f"{DIRECTORY}/lib/python{self._python.version}/site-packages"
        names = self._tree.names(site, suffix=".pth")
        return tuple(f"{site}/{name}" for name in names)

    def ensure(self) -> None:
        """Makes the venv where it is missing, repairs it where it is not as it was made."""
        seen = self._tree.fingerprint(self._watched)
        if seen is not None and seen == self._seen:
            return
        if not self._is_whole():
            self._repair()
        self._seen = self._tree.fingerprint(self._watched)

    def _is_whole(self) -> bool:
        """Compared with what was made; nothing that is read here is used."""
        try:
            return (
                all(
                    self._tree.get(f"{DIRECTORY}/{name}", max_bytes=_MOST_BYTES) == content.encode()
                    for name, content in self._files.items()
                )
                and all(
                    self._tree.read_link(f"{DIRECTORY}/{name}") == target
                    for name, target in self._links.items()
                )
                and all(self._tree.stat(name).mode & _OWNER == _OWNER for name in self._dirs)
            )
        except (OSError, SandboxError):
            return False

    def _repair(self) -> None:
        """First what is wrong, so that installed packages stay; if that fails, from nothing."""
        try:
            self._write()
            if self._is_whole():
                return
        except (OSError, SandboxError):
            _log.debug("the venv cannot be repaired in place", exc_info=True)
        if self._tree.exists(DIRECTORY):
            self._tree.remove(DIRECTORY, recursive=True)
        self._write()

    def _write(self) -> None:
        for name, content in self._files.items():
            self._tree.put(f"{DIRECTORY}/{name}", content.encode(), owner=self._owner)
        # Made now, or the first import of the hook would make it and look like an installation.
        cache = f"{DIRECTORY}/lib/python{self._python.version}/site-packages/__pycache__"
        self._tree.make_dir(cache, exist_ok=True, owner=self._owner)
        for name, target in self._links.items():
            self._tree.put_link(f"{DIRECTORY}/{name}", target, owner=self._owner)

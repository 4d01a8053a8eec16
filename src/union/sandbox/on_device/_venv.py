"""The session venv: a few files in the work dir, made without running anything.

Everything in the work dir belongs to sandboxed code, so this module writes there only through the
descriptors of the work tree, and what it reads back it only compares: nothing of the venv is
executed, imported or believed by the host. What sandboxed code did to it is put right before the
next command.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._core.files import VENV_DIR
from union.sandbox._plan.rootfs import RUN_DIR
from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from union.sandbox._linux.host import Interpreter
    from union.sandbox._linux.tree import WorkTree

__all__ = ["Venv"]

_MOST_BYTES: Final = 65536
_MOST_NAMES: Final = 4096
"""More than this in site-packages is not looked at before each run: sandboxed code could make a
million, and keep the host busy with them. Then every Python is started afresh."""
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
    """The venv of one session; it is looked at before each use, which costs a few stats."""

    def __init__(
        self,
        tree: WorkTree,
        python: Interpreter,
        *,
        run_dir: str = RUN_DIR,
    ) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._python = python
        self._files = _files(python, run_dir)
        self._links = _links(python)
        names = (*self._files, "bin/python")
        dirs = {"/".join(n.split("/")[:k]) for n in names for k in range(n.count("/") + 1)}
        self._dirs = tuple(sorted(f"{VENV_DIR}/{d}" if d else VENV_DIR for d in dirs))
        self._watched = (*self._dirs, *(f"{VENV_DIR}/{name}" for name in names))
        self._seen: tuple[tuple[int, int], ...] | None = None
        self._pth: tuple[str, ...] | None = ()

    def fingerprint(self) -> object:
        """Changes whenever packages are installed or anything that starts Python changes.

        As far as directories go, this is what the last ``ensure()`` saw.
        """
        if self._pth is None:
            return object()  # equal to no other: too much to tell whether it changed
        return self._seen, self._tree.fingerprint(self._pth)

    def _pth_files(self) -> tuple[str, ...] | None:
        site = f"{VENV_DIR}/lib/python{self._python.version}/site-packages"
        names = self._tree.names(site, suffix=".pth", most=_MOST_NAMES)
        if names is None:
            return None
        found = (f"{site}/{name}" for name in names)
        return tuple(name for name in found if name not in self._watched)

    @property
    def is_new(self) -> bool:
        """Whether this session has not looked at it yet."""
        return self._seen is None

    def is_as_seen(self) -> bool:
        """Whether nothing was done to it since ``ensure()``; a few stats."""
        seen = self._tree.fingerprint(self._watched)
        return seen is not None and seen == self._seen

    def ensure(self) -> None:
        """Makes the venv where it is missing, repairs it where it is not as it was made.

        That may be to remove a tree of any size, so it is no work for the event loop.
        """
        with self._lock:
            if self.is_as_seen():
                return
            if not self._is_whole():
                self._repair()
            self._seen = self._tree.fingerprint(self._watched)
            # A name that comes or goes changes the directory, and that is watched.
            self._pth = self._pth_files()

    def _is_whole(self) -> bool:
        """Compared with what was made; nothing that is read here is used."""
        try:
            return (
                all(
                    self._tree.get(f"{VENV_DIR}/{name}", max_bytes=_MOST_BYTES) == content.encode()
                    for name, content in self._files.items()
                )
                and all(
                    self._tree.read_link(f"{VENV_DIR}/{name}") == target
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
        if self._tree.exists(VENV_DIR):
            self._tree.remove(VENV_DIR, recursive=True)
        self._write()

    def _write(self) -> None:
        for name, content in self._files.items():
            self._tree.put(f"{VENV_DIR}/{name}", content.encode())
        # Made now, or the first import of the hook would make it and look like an installation.
        cache = f"{VENV_DIR}/lib/python{self._python.version}/site-packages/__pycache__"
        self._tree.make_dir(cache, exist_ok=True)
        for name, target in self._links.items():
            self._tree.put_link(f"{VENV_DIR}/{name}", target)

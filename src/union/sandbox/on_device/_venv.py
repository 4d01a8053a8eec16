"""The session venv: a few files in the work dir, created without running anything.

Everything in the work dir belongs to sandboxed code. This module writes there only through the
file descriptors of the work tree, and only compares what it reads: the host never executes,
imports or trusts anything in the venv. Changes by sandboxed code are repaired before the next
command.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._core.files import VENV_DIR
from union.sandbox._plan.rootfs import RUN_DIR
from union.sandbox._system import IS_LINUX
from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from union.sandbox._linux.held_names import HeldNames
    from union.sandbox._linux.host import Interpreter
    from union.sandbox._linux.tree import WorkTree

__all__ = ["HOOK_FILE", "Venv", "venv_config"]

_MAX_FILE_BYTES: Final = 65536
_MAX_NAMES: Final = 4096
"""Limit on entries of site-packages that are read before a run: sandboxed code could create a
million of them. Above it, no waiting Python is used."""
_OWNER: Final = 0o700
_log = logging.getLogger("union.sandbox")

HOOK_FILE: Final = Path(__file__).with_name("_start_hook.py")
PIP_FILE: Final = Path(__file__).with_name("_pip_front.py")


def venv_config(python: Interpreter) -> str:
    """Return the content of ``pyvenv.cfg``."""
    return (
        f"home = {os.path.dirname(python.executable)}\n"
        f"include-system-site-packages = {str(python.sees_system).lower()}\n"
        f"version = {python.version}\n"
        f"executable = {python.executable}\n"
    )


def _files(python: Interpreter, run_dir: str) -> dict[str, str]:
    """Return the regular files of the venv, as relative path -> content."""
    arguments = f"{run_dir!r}, {list(python.site_dirs)!r}"
    hook = f"import _union_sandbox; _union_sandbox.begin({arguments})\n"
    lib = f"lib/python{python.version}/site-packages"
    return {
        "pyvenv.cfg": venv_config(python),
        f"{lib}/_union_sandbox.pth": hook,
        f"{lib}/_union_sandbox.py": HOOK_FILE.read_text(encoding="utf-8"),
    }


def _links(python: Interpreter) -> dict[str, str]:
    links = {
        "bin/python": python.executable,
        "bin/python3": "python",
        f"bin/python{python.version}": "python",
    }
    return links | {"lib64": "lib"} if IS_LINUX else links


_START: Final = b"""#!/bin/sh
'''exec' "${0%/*}/python" "$0" "$@" #'''
"""
"""A shell starts the Python beside the program; for Python, the line is a text without effect."""


@functools.cache
def _pip_front() -> bytes:
    return _START + PIP_FILE.read_bytes()


def _tool_links(python: Interpreter) -> dict[str, str]:
    """Return the programs that are one file: the front of pip, which also calls uv."""
    target = f"../lib/python{python.version}/site-packages/pip.py"
    return {f"bin/{name}": target for name in ("pip", "pip3", "uv")}


class Venv:
    """The venv of one session; verified before each use by a few stat calls."""

    def __init__(
        self,
        tree: WorkTree,
        python: Interpreter,
        *,
        run_dir: str = RUN_DIR,
        is_kept: bool = False,
    ) -> None:
        """Describe the venv in ``tree``.

        Args:
            tree: the work dir.
            python: the owner's interpreter.
            run_dir: the directory with the script of a command, as it is seen inside.
            is_kept: the work dir is the caller's, and perhaps a repository: git ignores the venv.

        """
        self._tree = tree
        self._is_kept = is_kept
        self._lock = threading.Lock()
        self._python = python
        self._files = _files(python, run_dir)
        self._links = _links(python)
        names = (*self._files, "bin/python")
        dirs = {"/".join(n.split("/")[:k]) for n in names for k in range(n.count("/") + 1)}
        self._dirs = tuple(sorted(f"{VENV_DIR}/{d}" if d else VENV_DIR for d in dirs))
        self._watched = (*self._dirs, *(f"{VENV_DIR}/{name}" for name in names))
        self._held: HeldNames | None = None
        """The directories and files as the last ``ensure()`` left them."""
        self._is_new = True
        self._pth: tuple[str, ...] | None = ()

    def fingerprint(self) -> object:
        """Return a value that changes when packages or start-up files of Python change.

        Directories count as the last ``ensure()`` found them.
        """
        if self._pth is None:
            return object()  # unequal to any other: too many entries to compare
        held = self._held
        return None if held is None else held.marks, self._tree.fingerprint(self._pth)

    def _pth_files(self) -> tuple[str, ...] | None:
        site = f"{VENV_DIR}/lib/python{self._python.version}/site-packages"
        names = self._tree.names(site, suffix=".pth", most=_MAX_NAMES)
        if names is None:
            return None
        found = (f"{site}/{name}" for name in names)
        return tuple(name for name in found if name not in self._watched)

    @property
    def is_new(self) -> bool:
        """Whether this session has not verified it yet."""
        return self._is_new

    def is_unchanged(self) -> bool:
        """Return whether it is unchanged since ``ensure()``; a few stat calls."""
        held = self._held
        return held is not None and held.is_unchanged()

    def rest(self) -> None:
        """Close the directories that stay open between commands; the next one verifies all."""
        held, self._held = self._held, None
        if held is not None:
            self._tree.release(held)

    def ensure(self) -> None:
        """Create the venv if it is missing, repair it if it was changed.

        A repair may remove a tree of any size, so it must not run in the event loop.
        """
        with self._lock:
            if self.is_unchanged():
                return
            is_intact = self._is_intact()
            if not is_intact:
                self._repair()
            if not is_intact or self._is_new:
                self._put_tools()
            last, self._held = self._held, self._tree.hold(self._watched)
            self._is_new = False
            if last is not None:
                self._tree.release(last)
            # Adding or removing a name changes the directory, which is watched.
            self._pth = self._pth_files()

    def _is_intact(self) -> bool:
        """Compare the venv with its expected content; nothing that is read is used otherwise."""
        try:
            return (
                all(
                    self._tree.get(f"{VENV_DIR}/{name}", max_bytes=_MAX_FILE_BYTES)
                    == content.encode()
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
        """Rewrite changed files, which keeps installed packages; if that fails, start over."""
        try:
            self._write()
            if self._is_intact():
                return
        except (OSError, SandboxError):
            _log.debug("the venv cannot be repaired in place", exc_info=True)
        if self._tree.exists(VENV_DIR):
            self._tree.remove(VENV_DIR, recursive=True)
        self._write()

    def _put_tools(self) -> None:
        """Write the programs once per session; code inside may replace or remove them."""
        try:
            name = f"lib/python{self._python.version}/site-packages/pip.py"
            self._tree.put(f"{VENV_DIR}/{name}", _pip_front(), mode=0o755)
            for name, target in _tool_links(self._python).items():
                self._tree.put_link(f"{VENV_DIR}/{name}", target)
        except (OSError, SandboxError):
            _log.debug("the venv has other programs", exc_info=True)

    def _write(self) -> None:
        for name, content in self._files.items():
            self._tree.put(f"{VENV_DIR}/{name}", content.encode())
        # Created now, or the first import of the hook would create it and look like a change.
        cache = f"{VENV_DIR}/lib/python{self._python.version}/site-packages/__pycache__"
        self._tree.make_dir(cache, exist_ok=True)
        for name, target in self._links.items():
            self._tree.put_link(f"{VENV_DIR}/{name}", target)
        if self._is_kept:
            # Not verified before commands: sandboxed code may change what git ignores.
            self._tree.put(f"{VENV_DIR}/.gitignore", b"*\n")

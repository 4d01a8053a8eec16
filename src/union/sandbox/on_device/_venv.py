"""The session venv: a few files in the work dir, made without running anything.

Everything in the work dir belongs to sandboxed code, so this module only ever *writes* there,
through the descriptors of the work tree; nothing of the venv is read, executed or imported by the
host. What sandboxed code did to it breaks only the sandbox, and is put right at the next open.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from union.sandbox._core.view import RUN_DIR
from union.sandbox.errors import SandboxError

if TYPE_CHECKING:
    from union.sandbox._linux.host import Interpreter
    from union.sandbox._linux.tree import WorkTree

__all__ = ["DIRECTORY", "make_venv", "venv_is_whole"]

DIRECTORY: Final = ".sandbox-venv"
_MOST_CONFIG: Final = 4096

# Python source that run() was given is a script of ours in a directory of its own; what a user
# puts into the working directory should be importable from it all the same, as from a script there.
_HOOK: Final = (
    "import sys, os; os.path.dirname((sys.orig_argv + ['', ''])[1]) == {run_dir!r} "
    "and sys.path[0] != os.getcwd() and sys.path.insert(0, os.getcwd())\n"
)


def _files(python: Interpreter, run_dir: str = RUN_DIR) -> dict[str, str]:
    """Relative path -> content of every regular file of the venv."""
    home = os.path.dirname(python.executable)
    hook = _HOOK.format(run_dir=run_dir)
    for site_dir in python.site_dirs:
        # As a site directory, not just a path, so that its own .pth files count too.
        hook += f"import site; site.addsitedir({site_dir!r})\n"
    lib = f"lib/python{python.version}/site-packages"
    return {
        "pyvenv.cfg": (
            f"home = {home}\n"
            "include-system-site-packages = true\n"
            f"version = {python.version}\n"
            f"executable = {python.executable}\n"
        ),
        f"{lib}/_union_sandbox.pth": hook,
    }


def _links(python: Interpreter) -> dict[str, str]:
    return {
        "bin/python": python.executable,
        "bin/python3": "python",
        f"bin/python{python.version}": "python",
        "lib64": "lib",
    }


def venv_is_whole(tree: WorkTree, python: Interpreter) -> bool:
    """Whether what starts an interpreter there is as it was made; compared, not used."""
    try:
        config = tree.get(f"{DIRECTORY}/pyvenv.cfg", max_bytes=_MOST_CONFIG)
        link = tree.read_link(f"{DIRECTORY}/bin/python")
    except (OSError, SandboxError):
        return False
    wanted = _files(python)["pyvenv.cfg"].encode()
    return config == wanted and link == python.executable


def make_venv(
    tree: WorkTree,
    python: Interpreter,
    *,
    owner: tuple[int, int] | None,
    run_dir: str = RUN_DIR,
) -> None:
    """Makes the venv, or repairs what of it is not as it should be."""
    try:
        _write(tree, python, owner=owner, run_dir=run_dir)
    except (OSError, SandboxError):
        # Something else stands where the venv belongs: a file, a link, a directory with no rights.
        # It is the sandbox's own mess; start again from nothing.
        tree.remove(DIRECTORY, recursive=True)
        _write(tree, python, owner=owner, run_dir=run_dir)


def _write(
    tree: WorkTree, python: Interpreter, *, owner: tuple[int, int] | None, run_dir: str
) -> None:
    for name, content in _files(python, run_dir).items():
        tree.put(f"{DIRECTORY}/{name}", content.encode(), mode=0o644, overwrite=True, owner=owner)
    for name, target in _links(python).items():
        tree.put_link(f"{DIRECTORY}/{name}", target, owner=owner)

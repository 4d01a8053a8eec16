"""What of this host a sandbox is shown: system paths, selected /etc, the interpreter, CA files."""

from __future__ import annotations

import functools
import os
import shutil
import site
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from union.sandbox._core.view import BIN_DIR, Shown
from union.sandbox.constants import CA_VARIABLES
from union.sandbox.errors import BackendUnavailableError, SandboxUsageError

__all__ = [
    "CA_VARIABLES",
    "Interpreter",
    "ca_environment",
    "interpreter",
    "is_system",
    "shown",
    "system_view",
    "uv_binary",
]

_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC: Final = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "pki/ca-trust",
    "pki/tls/certs",
    "pki/tls/cert.pem",
    "pki/tls/openssl.cnf",
    "protocols",
    "services",
    "shells",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
"""Of /etc only what programs need and anybody may read: no keys, no accounts, no host's name."""


def shown(path: str, *, writable: bool = False, argument: str = "") -> Shown:
    """``path`` at its own place. A missing one is an error that names the argument."""
    try:
        found = os.stat(path)
    except OSError as exc:
        raise _missing(path, argument, exc) from exc
    return Shown(
        source=os.path.realpath(path),
        path=os.path.normpath(path),
        writable=writable,
        is_dir=stat.S_ISDIR(found.st_mode),
    )


def pinned(path: str, *, writable: bool, argument: str) -> tuple[Shown, os.stat_result]:
    """What the caller named, looked up once: its real place, its identity and its owner.

    The place is that of a descriptor, not of a second look-up: in between, whoever can write to a
    directory on the way could put a link there. A bind with this identity shows this or fails.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as exc:
        raise _missing(path, argument, exc) from exc
    try:
        found = os.fstat(fd)
        source = os.readlink(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    item = Shown(
        source=source,
        path=os.path.normpath(path),
        writable=writable,
        is_dir=stat.S_ISDIR(found.st_mode),
        identity=(found.st_dev, found.st_ino),
    )
    return item, found


def _missing(path: str, argument: str, exc: OSError) -> SandboxUsageError:
    return SandboxUsageError(
        f"{argument}: {path}: {exc.strerror}",
        argument=argument,
        hint="every path must exist when the session is opened",
    )


@functools.cache
def system_view() -> tuple[tuple[Shown, ...], tuple[tuple[str, str], ...]]:
    """System directories to bind, and the links among them to make again."""
    binds, links = [], []
    for path in (*_SYSTEM, *(f"/etc/{name}" for name in _ETC)):
        if os.path.islink(path) and path in _SYSTEM:
            links.append((path, os.readlink(path)))
        elif os.path.exists(path):
            binds.append(shown(path))
    return tuple(binds), tuple(links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The owner's Python: where it lives, and what of it must be visible."""

    executable: str
    """The base interpreter, even when the owner runs in a venv."""
    version: str
    paths: tuple[str, ...]
    """Directories that must be visible read-only."""
    site_dirs: tuple[str, ...]
    """Package directories of the owner's own venv, if it runs in one."""
    sees_system: bool
    """Whether the owner sees the base interpreter's packages, as a venv need not."""


@functools.cache
def interpreter() -> Interpreter:
    executable = os.path.abspath(getattr(sys, "_base_executable", "") or sys.executable)
    if not executable or not os.path.exists(executable):
        raise BackendUnavailableError(
            "the running Python does not know its own executable", missing=("interpreter",)
        )
    wanted = [sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.path.realpath(executable))]
    site_dirs: tuple[str, ...] = ()
    if sys.prefix != sys.base_prefix:
        wanted.append(sys.prefix)
        paths = sysconfig.get_paths()
        site_dirs = tuple(dict.fromkeys((paths["purelib"], paths["platlib"])))
    if executable.startswith("/nix/store/"):
        wanted.append("/nix/store")  # a program there needs the rest of its closure
    visible: list[str] = []
    for path in wanted:
        for spelling in (os.path.normpath(path), os.path.realpath(path)):
            if not _covered(spelling, visible):
                visible.append(spelling)
    _refuse_broad(visible)
    return Interpreter(
        executable=executable,
        version=f"{sys.version_info.major}.{sys.version_info.minor}",
        paths=tuple(visible),
        site_dirs=site_dirs,
        sees_system=not site_dirs or _sees_system_packages(),
    )


def _sees_system_packages() -> bool:
    return any(path in sys.path for path in site.getsitepackages([sys.base_prefix]))


def is_system(path: str) -> bool:
    """Whether a path lies in what every sandbox is shown."""
    return _covered(path, [])


def _covered(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(root + "/") for root in (*_SYSTEM, *roots))


def _refuse_broad(paths: list[str]) -> None:
    """Showing a prefix must not show a home directory with it."""
    home = os.path.realpath(os.path.expanduser("~"))
    for path in paths:
        if path in {"/", home} or home.startswith(path + "/"):
            raise BackendUnavailableError(
                f"the running Python is installed in {path}, which would show the sandbox more "
                "than the interpreter",
                missing=("interpreter",),
                hint="use a Python installed in a directory of its own",
            )


@functools.cache
def uv_binary() -> str:
    """``uv``: beside the owner's interpreter (the PyPI package), or on PATH."""
    beside = (sysconfig.get_path("scripts"), os.path.dirname(sys.executable))
    candidates = [os.path.join(directory, "uv") for directory in beside]
    candidates.append(shutil.which("uv") or "")
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK) and Path(candidate).is_file():
            return os.path.realpath(candidate)
    raise BackendUnavailableError(
        "uv was not found, and the session venv needs it",
        missing=("uv",),
        hint="pip install uv",
    )


def uv_shown() -> Shown:
    return Shown(source=uv_binary(), path=f"{BIN_DIR}/uv", is_dir=False)


def ca_environment() -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables that name a CA bundle, carried in, and the paths they need visible."""
    variables = {n: os.environ[n] for n in CA_VARIABLES if os.environ.get(n)}
    paths = []
    for value in variables.values():
        paths += [
            path
            for path in value.split(os.pathsep)
            if path.startswith("/") and os.path.exists(path) and not _covered(path, [])
        ]
    return variables, tuple(dict.fromkeys(paths))

"""Paths of the host that a sandbox sees: system paths, parts of /etc, the interpreter, CA files."""

from __future__ import annotations

import errno
import functools
import os
import re
import site
import stat
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from union.sandbox._linux import owner_packages
from union.sandbox._linux.pinning import LinkInWritablePlaceError, Places, pin
from union.sandbox._plan.rootfs import BIN_DIR, Shown
from union.sandbox.constants import CA_VARIABLES
from union.sandbox.errors import BackendUnavailableError, SandboxUsageError

__all__ = [
    "CA_VARIABLES",
    "Interpreter",
    "ca_environment",
    "interpreter",
    "is_on_tmpfs",
    "is_system",
    "mount_points",
    "pinned",
    "shown",
    "system_view",
    "uv_shown",
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
"""Files of /etc that programs need and every user may read: no keys, accounts or host name."""
_JAVA: Final = re.compile(r"java(-[\w.-]+)?")
"""Settings of Java, in a directory per version; without them it does not start."""


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


def pinned(
    path: str, places: Places, *, writable: bool = False, argument: str = ""
) -> tuple[Shown, os.stat_result]:
    """A path that the caller named, resolved once: its real path, its identity and its owner.

    A bind with this identity shows this or fails. Where sandboxed code cannot write there is no
    identity: the owner of a file may replace it.
    """
    try:
        with pin(path, places) as found:
            item = Shown(
                source=found.source,
                path=os.path.normpath(path),
                writable=writable,
                is_dir=stat.S_ISDIR(found.found.st_mode),
                identity=found.identity if found.is_writable_place else (0, 0),
            )
            return item, found.found
    except LinkInWritablePlaceError:
        raise
    except OSError as exc:
        if exc.errno in {errno.EMFILE, errno.ENFILE}:
            raise  # it says nothing about the path
        raise _missing(path, argument, exc) from exc


def _missing(path: str, argument: str, exc: OSError) -> SandboxUsageError:
    return SandboxUsageError(
        f"{argument}: {path}: {exc.strerror}",
        argument=argument,
        hint="every path must exist when the session is opened",
    )


def mount_points() -> dict[str, str]:
    """Return where file systems are mounted on this host: path -> type, the visible one."""
    found = {}
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        left, _, right = line.partition(b" - ")
        found[os.fsdecode(_unescaped(left.split()[4]))] = right.split()[0].decode()
    return found


def is_on_tmpfs(path: str, points: dict[str, str]) -> bool:
    """Return whether a canonical path is on a tmpfs, given ``mount_points()``."""
    above = (p for p in points if path == p or path.startswith(p.rstrip("/") + "/"))
    return points.get(max(above, key=len, default="")) == "tmpfs"


def _unescaped(path: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), path)


@functools.cache
def system_view() -> tuple[tuple[Shown, ...], tuple[tuple[str, str], ...]]:
    """System directories to bind, and the links among them to make again."""
    binds, links = [], []
    java = (f"/etc/{name}" for name in sorted(os.listdir("/etc")) if _JAVA.fullmatch(name))
    for path in (*_SYSTEM, *(f"/etc/{name}" for name in _ETC), *java):
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
    """Package directories of the owner's own venv, if it runs in one, and of its ``--user``
    installs, if its Python uses them."""
    editable: tuple[str, ...]
    """Return the paths that editable installs of the owner refer to."""
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
    venv_dirs: tuple[str, ...] = ()
    if sys.prefix != sys.base_prefix:
        wanted.append(sys.prefix)
        paths = sysconfig.get_paths()
        venv_dirs = tuple(dict.fromkeys((paths["purelib"], paths["platlib"])))
    user_site = owner_packages.user_site()
    if user_site is not None:
        wanted.append(user_site)
    if executable.startswith("/nix/store/"):
        wanted.append("/nix/store")  # a program there needs the rest of its closure
    visible: list[str] = []
    for path in wanted:
        for spelling in (os.path.normpath(path), os.path.realpath(path)):
            if not _covered(spelling, visible):
                visible.append(spelling)
    _refuse_broad(visible)
    site_dirs = (*venv_dirs, *((user_site,) if user_site is not None else ()))
    sees_system = not venv_dirs or _sees_system_packages()
    base_dirs = site.getsitepackages([sys.base_prefix]) if sees_system else []
    return Interpreter(
        executable=executable,
        version=f"{sys.version_info.major}.{sys.version_info.minor}",
        paths=tuple(visible),
        site_dirs=site_dirs,
        editable=tuple(
            path
            for path in owner_packages.editable_paths((*site_dirs, *base_dirs))
            if not _covered(path, visible)
        ),
        sees_system=sees_system,
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


def uv_shown(program: str) -> Shown:
    """Return where sandboxes see ``uv``."""
    return Shown(source=program, path=f"{BIN_DIR}/uv", is_dir=False)


def ca_environment() -> tuple[dict[str, str], dict[str, str]]:
    """Variables that name a CA bundle, carried in; and path -> variable of what they name.

    A path that does not exist is the caller's affair; the one who pins the others finds out.
    """
    variables = {n: os.environ[n] for n in CA_VARIABLES if os.environ.get(n)}
    paths: dict[str, str] = {}
    for name, value in variables.items():
        for path in value.split(os.pathsep):
            if path.startswith("/") and not _covered(os.path.normpath(path), []):
                paths.setdefault(path, name)
    return variables, paths

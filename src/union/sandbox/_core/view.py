"""The file system a sandbox sees, as values: what is shown where, in which order.

A ``View`` is what a backend builds; it is gathered from the host by ``_linux.host`` and turned
into steps here, purely. Parents come before children, so whatever is mounted last at a place wins;
the caller's paths and the work dir therefore sit on top of the system's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from union.sandbox._core import plan as p

__all__ = ["Shown", "View", "landlock_steps", "mount_steps"]

RUN_DIR: Final = "/run/sandbox"
PYTHON_SLOT: Final = f"{RUN_DIR}/main.py"
SHELL_SLOT: Final = f"{RUN_DIR}/main.sh"
BIN_DIR: Final = f"{RUN_DIR}/bin"
_SCRIPT_BYTES: Final = 256 * 1024 * 1024
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_DEV_LINKS: Final = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
)
# Landlock access rights, in the order of their bits.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_ABI_RIGHTS: Final = (1 << 13) - 1
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_ON_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One thing of the host that is visible inside."""

    source: str
    path: str
    writable: bool = False
    is_dir: bool = True
    fd: int | None = None
    idmap: int | None = None
    identity: tuple[int, int] = (0, 0)

    def bind(self) -> p.Bind:
        attrs = p.NOSUID | p.NODEV | (0 if self.writable else p.RDONLY)
        return p.Bind(
            self.source, self.path, attrs, fd=self.fd, idmap=self.idmap, identity=self.identity
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything visible inside, beyond what every sandbox has (/dev, /proc, /tmp)."""

    system: tuple[Shown, ...]
    links: tuple[tuple[str, str], ...]
    """(path, target) of the host's own links, such as /bin."""
    files: tuple[tuple[str, bytes], ...]
    """(path, content) of files made for the sandbox."""
    added: tuple[Shown, ...]
    """The interpreter, the caller's paths and the work dir."""
    fresh_proc: bool
    guarded_proc: tuple[str, ...]
    """Parts of /proc made read-only by mount, where the sandbox has the id of the host's root."""
    staging: str
    tmp_bytes: int
    shm_bytes: int


class _Layout:
    """Collects steps and makes each missing parent directory once."""

    def __init__(self) -> None:
        self.steps: list[p.Step] = []
        self._dirs = {"/"}
        self._bound: list[str] = []

    def parents(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        self.directory(parent or "/")

    def directory(self, path: str) -> None:
        if path in self._dirs or self._covered(path):
            return
        self.parents(path)
        self._dirs.add(path)
        self.steps.append(p.Mkdir(path))

    def _covered(self, path: str) -> bool:
        """Below a bind the host's own directories are the mount points."""
        return any(path == b or path.startswith(b + "/") for b in self._bound)

    def bind(self, shown: Shown) -> None:
        self.parents(shown.path)
        self.steps.append(shown.bind())
        if shown.is_dir:
            self._bound.append(shown.path)


def mount_steps(view: View) -> list[p.Step]:
    """The private root, filled."""
    out = _Layout()
    out.steps.append(p.Root(view.staging, "mode=755,size=1m,nr_inodes=4096"))
    for shown in view.system:
        out.bind(shown)
    for path, target in view.links:
        out.parents(path)
        out.steps.append(p.Symlink(path, target))
    for path, content in view.files:
        out.parents(path)
        out.steps.append(p.File(path, content))
    _add_dev(out, view)
    _add_proc(out, view)
    out.steps.append(p.Detach())
    out.directory("/tmp")  # noqa: S108 - a name inside the sandbox
    out.steps.append(p.Tmpfs("/tmp", view.tmp_bytes))  # noqa: S108
    out.directory(RUN_DIR)
    out.steps.append(p.Tmpfs(RUN_DIR, _SCRIPT_BYTES, mode=0o755, inodes=64))
    for shown in sorted(view.added, key=lambda s: s.path.count("/")):
        out.bind(shown)
    out.steps.append(p.Slot(PYTHON_SLOT))
    out.steps.append(p.Slot(SHELL_SLOT))
    return out.steps


def _add_dev(out: _Layout, view: View) -> None:
    out.directory("/dev")
    for name in _DEVICES:
        # A device must stay usable as one, so these binds alone lack nodev. Read-only guards the
        # node itself; what is written to a device does not count.
        attrs = p.RDONLY | p.NOSUID | p.NOEXEC
        out.steps.append(p.Bind(f"/dev/{name}", f"/dev/{name}", attrs))
    for name, target in _DEV_LINKS:
        out.steps.append(p.Symlink(f"/dev/{name}", target))
    out.directory("/dev/shm")  # noqa: S108 - a name inside the sandbox
    out.steps.append(p.Tmpfs("/dev/shm", view.shm_bytes))  # noqa: S108


def _add_proc(out: _Layout, view: View) -> None:
    out.directory("/proc")
    if view.fresh_proc:
        out.steps.append(p.Proc("/proc"))
    else:
        out.steps.append(p.Bind("/proc", "/proc", p.NOSUID | p.NODEV | p.NOEXEC))
    out.steps.extend(p.Bind(path, path) for path in view.guarded_proc)


def landlock_steps(view: View, *, abi: int) -> list[p.Step]:
    """A second, independent layer: read what is in this root, write only where it is said."""
    if abi < 1:
        return []
    handled = _FIRST_ABI_RIGHTS
    for needed, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        if abi >= needed:
            handled |= right
    scoped = 0b11 if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    write = handled & ~(_MAKE_CHAR | _MAKE_BLOCK)
    steps: list[p.Step] = [
        p.LandlockCreate(handled, 0, scoped, size),
        p.LandlockPath("/", _READ),
        p.LandlockPath("/dev", handled & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEV)),
        p.LandlockPath("/dev/shm", write),  # noqa: S108
        p.LandlockPath("/tmp", write),  # noqa: S108
    ]
    steps.extend(
        p.LandlockPath(s.path, write if s.is_dir else write & _ON_FILES)
        for s in view.added
        if s.writable
    )
    steps.append(p.LandlockRestrict())
    return steps

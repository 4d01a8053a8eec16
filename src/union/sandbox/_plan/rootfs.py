"""The file system of a sandbox: which host paths are mounted where, and in which order.

``_linux.host`` collects a ``View`` from the host; this module turns it into steps without I/O.
Parents come before children, and the last mount at a path is the visible one, so the caller's
paths and the work dir lie on top of the system's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._plan import plan as p

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "OWN_MOUNTS",
    "Shown",
    "View",
    "can_share",
    "hiding_steps",
    "landlock_steps",
    "own_steps",
    "shared_steps",
]

RUN_DIR: Final = "/run/sandbox"
PYTHON_SLOT: Final = f"{RUN_DIR}/main.py"
SHELL_SLOT: Final = f"{RUN_DIR}/main.sh"
BIN_DIR: Final = "/run/tools"
_EMPTY: Final = "/run/empty"
"""An empty file, mounted over hidden ones."""
_TMP: Final = "/tmp"  # noqa: S108 - names inside the sandbox
_SHM: Final = "/dev/shm"  # noqa: S108
_PTS: Final = "/dev/pts"
OWN_MOUNTS: Final = (_TMP, _SHM, RUN_DIR)
"""Directories that each sandbox has for itself, created anew."""
HELD_DIR: Final = "/run/held"
"""Where the shared part keeps mounts that each sandbox needs below ``OWN_MOUNTS``."""
_SCRIPT_BYTES: Final = 256 * 1024 * 1024
_DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
_DEV_LINKS: Final = (
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
)
# Landlock access rights, in the order of their bits.
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV, _RESOLVE_UNIX = 1 << 13, 1 << 14, 1 << 15, 1 << 16
_FIRST_ABI_RIGHTS: Final = (1 << 13) - 1
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_ON_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One file or directory of the host that is visible inside."""

    source: str
    path: str
    writable: bool = False
    is_dir: bool = True
    fd: int | None = None
    idmap: int | None = None
    identity: tuple[int, int] = (0, 0)
    guard: bool = False
    """Whether it is a writable directory that is visible anyway, mounted above a read-only path: a
    mount point cannot be renamed or removed from inside."""
    verify: bool = False
    """Whether each sandbox checks that exactly this is mounted here."""

    def bind(self) -> p.Bind:
        attrs = p.NOSUID | p.NODEV | (0 if self.writable else p.RDONLY)
        return p.Bind(
            self.source,
            self.path,
            attrs,
            fd=self.fd,
            idmap=self.idmap,
            identity=self.identity,
            existing=self.verify,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything visible inside, beyond what every sandbox has (/dev, /proc, /tmp)."""

    system: tuple[Shown, ...]
    links: tuple[tuple[str, str], ...]
    """(path, target) of the host's own links, such as /bin."""
    files: tuple[tuple[str, bytes], ...]
    """(path, content) of files created for the sandbox."""
    added: tuple[Shown, ...]
    """The interpreter, the caller's paths and the work dir."""
    fresh_proc: bool
    guarded_proc: tuple[str, ...]
    """Parts of /proc made read-only by mount, where the sandbox has the id of the host's root."""
    hidden_proc: tuple[str, ...] = ()
    """Files of /proc that are replaced by an empty file."""
    staging: str
    pivot: bool
    """Whether the root is entered by pivot_root; if not, it is moved over the caller's."""
    tmp_bytes: int
    shm_bytes: int
    terminals: bool = False
    """Whether pseudo-terminals can be opened; only for a command with ``pty``."""
    nodes: tuple[Shown, ...] = ()
    """Devices beyond those of every sandbox."""
    counters: tuple[tuple[str, int], ...] = ()
    """Limits of the user namespace, by their names in /proc/sys/user."""


class _Layout:
    """Collect steps, and create each missing parent directory once."""

    def __init__(self) -> None:
        self.steps: list[p.Step] = []
        self._dirs = {"/"}
        self._bound: list[str] = []

    def made(self, paths: Iterable[str]) -> None:
        """Record directories that exist already."""
        self._dirs.update(paths)

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
        """Return whether a bind contains the path, whose mount point then exists on the host."""
        return any(path == b or path.startswith(b + "/") for b in self._bound)

    def bind(self, shown: Shown) -> None:
        self.parents(shown.path)
        self.steps.append(shown.bind())
        if shown.is_dir:
            self._bound.append(shown.path)


def _is_below(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(place + "/") for place in places)


def shared_steps(view: View, *, hold: bool = False) -> list[p.Step]:
    """Return the steps of the private root that are the same for every sandbox of a session.

    With ``hold`` this part is built ahead. It then also keeps the mounts that each sandbox needs
    below a directory of its own, because the host's files are unreachable afterwards.
    """
    out = _Layout()
    out.steps.append(p.Root(view.staging, "mode=755,size=1m,nr_inodes=4096"))
    out.steps.append(p.Enter(move=not view.pivot))
    for shown in view.system:
        out.bind(shown)
    for path, target in view.links:
        out.parents(path)
        out.steps.append(p.Symlink(path, target))
    for path, content in view.files:
        out.parents(path)
        out.steps.append(p.File(path, content))
    if view.hidden_proc:
        out.parents(_EMPTY)
        out.steps.append(p.File(_EMPTY))
    _add_dev(out, view)
    _add_proc(out, view)
    out.steps.extend(p.Counter(name, value) for name, value in view.counters)
    if not (hold and view.fresh_proc):
        # A sandbox with a fresh /proc hides them there. Hidden here, they would make the kernel
        # refuse to mount the fresh one.
        out.steps.extend(hiding_steps(view))
    if view.pivot:
        out.steps.append(p.Detach())
    for place in OWN_MOUNTS:
        out.directory(place)
    for shown in _by_depth(s for s in view.added if not _is_below(s.path, OWN_MOUNTS)):
        out.bind(shown)
    for place, shown in _held(view) if hold else ():
        out.bind(dataclasses.replace(shown, path=place, verify=False))
    out.steps.append(p.Remount("/"))
    return out.steps


def own_steps(view: View, *, held: bool = False) -> list[p.Step]:
    """Return the steps of each sandbox; ``held`` means that the shared part was built ahead."""
    out = _Layout()
    out.made(OWN_MOUNTS)
    out.steps.append(p.Tmpfs(_TMP, view.tmp_bytes))
    out.steps.append(p.Tmpfs(_SHM, view.shm_bytes))
    out.steps.append(p.Tmpfs(RUN_DIR, _SCRIPT_BYTES, mode=0o755, inodes=64))
    if view.terminals:
        out.steps.append(p.Devpts(_PTS))
    for place, shown in _held(view):
        kept = dataclasses.replace(shown, source=place, fd=None, idmap=None, identity=(0, 0))
        out.bind(kept if held else shown)
    if held and _held(view):
        # The mounts are in place now, so the directory that kept them is covered.
        out.steps.append(p.Tmpfs(HELD_DIR, 4096, mode=0o555, inodes=1, read_only=True))
    out.steps.extend(p.Identity(s.path, s.identity, mounted=True) for s in view.added if s.verify)
    out.steps.append(p.Slot(PYTHON_SLOT))
    out.steps.append(p.Slot(SHELL_SLOT))
    return out.steps


def hiding_steps(view: View) -> list[p.Step]:
    """Return steps that hide files of /proc which show data of the caller."""
    return [p.Hide(path, _EMPTY) for path in view.hidden_proc]


def can_share(view: View) -> bool:
    """Return whether all mounts of the view can be part of a shared root."""
    return not view.guarded_proc


def _held(view: View) -> list[tuple[str, Shown]]:
    """Return the mounts below directories of each sandbox, and where the shared part keeps them."""
    below = _by_depth(s for s in view.added if _is_below(s.path, OWN_MOUNTS))
    return [(f"{HELD_DIR}/{number}", shown) for number, shown in enumerate(below)]


def _by_depth(shown: Iterable[Shown]) -> list[Shown]:
    return sorted(shown, key=lambda s: s.path.count("/"))


def _add_dev(out: _Layout, view: View) -> None:
    out.directory("/dev")
    paths = [(f"/dev/{name}", f"/dev/{name}") for name in _DEVICES]
    for source, path in (*paths, *((node.source, node.path) for node in view.nodes)):
        # A device must stay usable, so only these binds lack nodev. Read-only protects the node
        # itself; writes to the device are not affected.
        out.steps.append(p.Bind(source, path, p.RDONLY | p.NOSUID | p.NOEXEC))
    for name, target in _DEV_LINKS:
        out.steps.append(p.Symlink(f"/dev/{name}", target))
    out.directory(_PTS)  # empty unless a sandbox has terminals


def _add_proc(out: _Layout, view: View) -> None:
    out.directory("/proc")
    if view.fresh_proc:
        out.steps.append(p.Proc("/proc"))
    else:
        out.steps.append(p.Bind("/proc", "/proc", p.NOSUID | p.NODEV | p.NOEXEC))
    out.steps.extend(p.Bind(path, path) for path in view.guarded_proc)


def landlock_steps(view: View, *, abi: int) -> list[p.Step]:
    """Return a second, independent layer: read anything in this root, write only listed paths."""
    if abi < 1:
        return []
    handled = _FIRST_ABI_RIGHTS
    for needed, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV), (9, _RESOLVE_UNIX)):
        if abi >= needed:
            handled |= right
    scoped = 0b11 if abi >= 6 else 0
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    # A run may connect to its own path sockets without a rule. A socket in a writable path may be
    # that of another run with another network, which could pass a connection on.
    write = handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _RESOLVE_UNIX)
    steps: list[p.Step] = [
        p.LandlockCreate(handled, 0, scoped, size),
        p.LandlockPath("/", _READ),
        p.LandlockPath("/dev", handled & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEV)),
        p.LandlockPath(_SHM, write),
        p.LandlockPath(_TMP, write),
    ]
    steps.extend(
        p.LandlockPath(s.path, write if s.is_dir else write & _ON_FILES)
        for s in view.added
        if s.writable and not s.guard  # the rule of the directory above covers a guard
    )
    if handled & _RESOLVE_UNIX:
        # A socket in a read-only path can only be the caller's own.
        steps.extend(p.LandlockPath(s.path, _RESOLVE_UNIX) for s in view.added if not s.writable)
    steps.append(p.LandlockRestrict())
    return steps

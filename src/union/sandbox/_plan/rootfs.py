"""The file system of a sandbox: which host paths are mounted where, and in which order.

``_linux.host`` collects a ``View`` from the host; this module turns it into steps without I/O.
Parents come before children, and the last mount at a path is the visible one, so the caller's
paths and the work dir lie on top of the system's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from union.sandbox._plan import plan as p

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "DEVICES",
    "ON_FILES",
    "OWN_MOUNTS",
    "READ",
    "LandlockRights",
    "NetworkFile",
    "Shown",
    "View",
    "can_share",
    "held_place",
    "hiding_steps",
    "landlock_rights",
    "landlock_steps",
    "machine_steps",
    "of_network",
    "own_mounts",
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
VAR_TMP: Final = "/var/tmp"  # noqa: S108
HELD_DIR: Final = RUN_DIR
"""Where the shared part keeps what only some sandboxes show, or show below ``OWN_MOUNTS``. Each
sandbox takes its own from there and then covers all of it: it mounts a tmpfs at this path."""
_SCRIPT_BYTES: Final = 256 * 1024 * 1024
_BETWEEN_BYTES: Final = 1024 * 1024
_BETWEEN_INODES: Final = 1024
"""Limits of a directory between a scratch directory and a path that is shown below it."""
DEVICES: Final = ("null", "zero", "full", "random", "urandom", "tty")
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
_SCOPE_ABSTRACT: Final = 1
_FIRST_ABI_RIGHTS: Final = (1 << 13) - 1
READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
ON_FILES: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


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
    is_private: bool = False
    """Whether it is a directory of the session's own: mount points may be created in it."""

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
class NetworkFile:
    """A file that sandboxes with one kind of network see in place of one of ``View.files``."""

    network: str
    path: str
    content: bytes = b""
    source: str = ""
    """The host's file that is shown; if empty, a new file has ``content``."""

    @property
    def held_at(self) -> str:
        """The place in the shared part where it is kept."""
        return f"{HELD_DIR}/{self.network}-{self.path.rpartition('/')[2]}"

    def shown(self, path: str) -> Shown:
        return Shown(source=self.source, path=path, is_dir=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything visible inside, beyond what every sandbox has (/dev, /proc, /tmp)."""

    system: tuple[Shown, ...]
    links: tuple[tuple[str, str], ...]
    """(path, target) of the host's own links, such as /bin."""
    files: tuple[tuple[str, bytes], ...]
    """(path, content) of files created for the sandbox."""
    network_files: tuple[NetworkFile, ...] = ()
    """The only part of the view that depends on a sandbox's network."""
    added: tuple[Shown, ...]
    """The interpreter, the caller's paths and the work dir."""
    fresh_proc: bool
    guarded_proc: tuple[str, ...]
    """Parts of /proc made read-only by mount, where the sandbox has the id of the host's root."""
    hidden_proc: tuple[str, ...] = ()
    """Files of /proc that are replaced by an empty file."""
    work_dir: str = ""
    """The path of the work dir, which is one of ``added``."""
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
    machine: bool = False
    """Whether the directories that each sandbox has for itself are those of a machine, which its
    commands share; they include /var/tmp, which other sandboxes do not have."""
    mount_points: tuple[str, ...] = ()
    """Mount points of the host, for a kernel that cannot set the flags of a whole tree at once:
    each mount below a path that is shown then gets them by itself."""


class _Layout:
    """Collect steps, and create each missing parent directory once."""

    def __init__(self) -> None:
        self.steps: list[p.Step] = []
        self._dirs = {"/"}
        self._bound: dict[str, Shown] = {}
        """Directories that are bound, by path."""

    def made(self, paths: Iterable[str]) -> None:
        """Record directories that exist already."""
        self._dirs.update(paths)

    def parents(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        self.directory(parent or "/")

    def directory(self, path: str) -> None:
        # The mount point of a path below a bind exists on the host.
        if path in self._dirs or self._around(path) is not None:
            return
        self.parents(path)
        self._dirs.add(path)
        self.steps.append(p.Mkdir(path))

    def _around(self, path: str) -> Shown | None:
        """Return the innermost bind that contains the path."""
        while path:
            if (found := self._bound.get(path)) is not None:
                return found
            path = path.rpartition("/")[0]
        return None

    def bind(self, shown: Shown, below: Iterable[str] = ()) -> None:
        """Add a bind; ``below`` are the mount points in it, relative to it."""
        self.parents(shown.path)
        step = shown.bind()
        nearest = self._around(shown.path)
        if nearest is not None and nearest.writable and not nearest.is_private:
            # The mount point is a file of the caller. If it was deleted meanwhile, the step fails:
            # creating it would leave an empty file in the caller's directory.
            step = dataclasses.replace(step, existing=True)
        self.steps.append(step)
        self.steps.extend(p.Remount(f"{shown.path}/{name}", step.attrs) for name in below)
        if shown.is_dir:
            self._bound.setdefault(shown.path, shown)


def _is_below(path: str, places: Iterable[str]) -> bool:
    for place in places:  # noqa: SIM110 - any() takes twice as long, for every path of a session
        if path == place or path.startswith(place + "/"):
            return True
    return False


def _below(view: View, shown: Shown) -> list[str]:
    """Return the mount points below a path, relative to it, parents first."""
    if not view.mount_points:
        return []
    above = shown.source.rstrip("/") + "/"
    found = {point[len(above) :] for point in view.mount_points if point.startswith(above)}
    return sorted(found)


def shared_steps(view: View, *, hold: bool = False) -> list[p.Step]:
    """Return the steps of the private root that are the same for every sandbox of a session.

    With ``hold`` this part is built ahead. It then also keeps the mounts that each sandbox needs
    below a directory of its own, because the host's files are unreachable afterwards.
    """
    out = _Layout()
    out.steps.append(p.Root(view.staging, "mode=755,size=1m,nr_inodes=4096"))
    out.steps.append(p.Enter(move=not view.pivot))
    for shown in view.system:
        out.bind(shown, _below(view, shown))
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
    own = own_mounts(view)
    for place in own:
        out.directory(place)
    for shown in _by_depth(s for s in view.added if not _is_below(s.path, own)):
        out.bind(shown, _below(view, shown))
    if hold:
        _hold(out, view)
    out.steps.append(p.Remount("/"))
    return out.steps


def _hold(out: _Layout, view: View) -> None:
    """Keep what each sandbox takes for itself, and the files of each kind of network."""
    for place, shown in _held(view):
        out.bind(dataclasses.replace(shown, path=place, verify=False), _below(view, shown))
    for file in view.network_files:
        if file.source:
            out.bind(file.shown(file.held_at))
        else:
            out.steps.append(p.File(file.held_at, file.content))


def own_steps(view: View, *, held: bool = False, network: str = "") -> list[p.Step]:
    """Return the steps of each sandbox.

    Args:
        view: the view of the session.
        held: the shared part was built ahead, for all kinds of network.
        network: the kind of network; only used with ``held``. See ``of_network``.

    """
    out = _Layout()
    out.made(OWN_MOUNTS)
    if held:
        # Before HELD_DIR is covered.
        out.steps.extend(
            p.Cover(file.path, file.held_at)
            for file in view.network_files
            if file.network == network
        )
    if not view.machine:
        _add_scratch(out, view)
    out.steps.append(p.Tmpfs(RUN_DIR, _SCRIPT_BYTES, mode=0o755, inodes=64))
    if view.terminals:
        out.steps.append(p.Devpts(_PTS))
    if not view.machine:
        _add_held(out, view, held=held)
    out.steps.extend(p.Identity(s.path, s.identity, mounted=True) for s in view.added if s.verify)
    out.steps.append(p.Slot(PYTHON_SLOT))
    out.steps.append(p.Slot(SHELL_SLOT))
    return out.steps


def _add_scratch(out: _Layout, view: View) -> None:
    out.steps.append(p.Tmpfs(_TMP, view.tmp_bytes))
    out.steps.append(p.Tmpfs(_SHM, view.shm_bytes))


def _add_held(out: _Layout, view: View, *, held: bool) -> None:
    for place, shown in _held(view):
        # The source was opened before the first step, so it may be covered by now.
        kept = dataclasses.replace(shown, source=place, fd=None, idmap=None, identity=(0, 0))
        out.bind(kept if held else shown, _below(view, shown))


def machine_steps(view: View) -> list[p.Step]:
    """Return the steps of a machine: the scratch directories that all of its commands share.

    Each directory between a scratch directory and a path that is shown below it is a mount, which
    sandboxed code cannot rename: the path would otherwise be missing in the next command.
    """
    out = _Layout()
    out.made(own_mounts(view))
    _add_scratch(out, view)
    out.steps.append(p.Tmpfs(VAR_TMP, view.tmp_bytes))
    shown = {path for _, held in _held(view) for path in _parents(held.path)}
    between = {path for path in shown if not _is_place(path, own_mounts(view))}
    for path in sorted(between - {held.path for _, held in _held(view)}):
        out.directory(path)
        out.steps.append(p.Tmpfs(path, _BETWEEN_BYTES, mode=0o755, inodes=_BETWEEN_INODES))
    _add_held(out, view, held=True)
    return out.steps


def own_mounts(view: View) -> tuple[str, ...]:
    """Return the directories that are not those of the shared part."""
    return (*OWN_MOUNTS, VAR_TMP) if view.machine else OWN_MOUNTS


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(2, len(parts))]


def _is_place(path: str, places: tuple[str, ...]) -> bool:
    """Return whether a path is one of the places, or above all of them."""
    return path in places or not _is_below(path, places)


def hiding_steps(view: View) -> list[p.Step]:
    """Return steps that hide files of /proc which show data of the caller."""
    return [p.Cover(path, _EMPTY) for path in view.hidden_proc]


def of_network(view: View, network: str) -> View:
    """Return the view of sandboxes with one kind of network, which share no part with others."""
    own = [file for file in view.network_files if file.network == network]
    replaced = {file.path for file in own}
    return dataclasses.replace(
        view,
        system=(*view.system, *(file.shown(file.path) for file in own if file.source)),
        files=(
            *(one for one in view.files if one[0] not in replaced),
            *((file.path, file.content) for file in own if not file.source),
        ),
        network_files=(),
    )


def can_share(view: View) -> bool:
    """Return whether all mounts of the view can be part of a shared root."""
    return not view.guarded_proc


def _held(view: View) -> list[tuple[str, Shown]]:
    """Return the mounts below directories of each sandbox, and where the shared part keeps them."""
    own = own_mounts(view)
    below = _by_depth(s for s in view.added if _is_below(s.path, own))
    return [(f"{HELD_DIR}/{number}", shown) for number, shown in enumerate(below)]


def held_place(view: View) -> str:
    """Return where the shared part has the work dir."""
    found = (place for place, shown in _held(view) if shown.path == view.work_dir)
    return next(found, view.work_dir)


def _by_depth(shown: Iterable[Shown]) -> list[Shown]:
    return sorted(shown, key=lambda s: s.path.count("/"))


def _add_dev(out: _Layout, view: View) -> None:
    out.directory("/dev")
    paths = [(f"/dev/{name}", f"/dev/{name}") for name in DEVICES]
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


class LandlockRights(NamedTuple):
    """The rights that an ABI of Landlock restricts, and those of a writable directory."""

    handled: int
    write: int
    scoped: int
    attr_size: int


def landlock_rights(abi: int) -> LandlockRights:
    """Return the rights of an ABI of Landlock."""
    handled = _FIRST_ABI_RIGHTS
    for needed, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV), (9, _RESOLVE_UNIX)):
        if abi >= needed:
            handled |= right
    return LandlockRights(
        handled=handled,
        # A run may connect to its own path sockets without a rule. A socket in a writable path may
        # be that of another run with another network, which could pass a connection on.
        write=handled & ~(_MAKE_CHAR | _MAKE_BLOCK | _RESOLVE_UNIX),
        scoped=0b11 if abi >= 6 else 0,
        attr_size=24 if abi >= 6 else 16 if abi >= 4 else 8,
    )


def landlock_steps(view: View, *, abi: int) -> list[p.Step]:
    """Return a second, independent layer: read anything in this root, write only listed paths."""
    if abi < 1:
        return []
    rights = landlock_rights(abi)
    handled, write = rights.handled, rights.write
    steps: list[p.Step] = [
        # Commands of one machine may signal each other: they stop what earlier ones have started.
        p.LandlockCreate(
            handled, 0, rights.scoped & (_SCOPE_ABSTRACT if view.machine else ~0), rights.attr_size
        ),
        p.LandlockPath("/", READ),
        p.LandlockPath("/dev", handled & (_WRITE_FILE | _TRUNCATE | _IOCTL_DEV)),
        p.LandlockPath(_SHM, write),
        p.LandlockPath(_TMP, write),
    ]
    if view.machine:
        steps.append(p.LandlockPath(VAR_TMP, write))
    steps.extend(
        p.LandlockPath(_rule_path(s, view), write if s.is_dir else write & ON_FILES)
        for s in view.added
        if s.writable and not s.guard  # the rule of the directory above covers a guard
    )
    if handled & _RESOLVE_UNIX:
        # A socket in a read-only path can only be the caller's own.
        steps.extend(p.LandlockPath(s.path, _RESOLVE_UNIX) for s in view.added if not s.writable)
    steps.append(p.LandlockRestrict())
    return steps


def _rule_path(shown: Shown, view: View) -> str:
    """Return the path whose rule makes ``shown`` writable.

    A rule belongs to an inode, so a rule of the work dir does not apply to what is mounted over the
    work dir later. A rule of the directory above does. That directory is part of the private root,
    which is read-only by its mount. It must contain nothing but the work dir: for everything else
    in it, the mount would be the only layer left.
    """
    parent = shown.path.rpartition("/")[0]
    if shown.path != view.work_dir or not parent or _is_below(parent, own_mounts(view)):
        return shown.path
    mounts = {s.path for s in (*view.system, *view.added, *view.nodes)}
    if _is_below(parent, mounts):
        return shown.path
    made = {path for path, _ in (*view.links, *view.files)}
    others = mounts | made | {*own_mounts(view), BIN_DIR, _EMPTY, _PTS, "/proc"}
    if any(_is_below(path, (parent,)) and not _is_below(path, (shown.path,)) for path in others):
        return shown.path
    return parent

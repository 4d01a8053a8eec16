"""Plans: the steps by which the launcher builds a sandbox, as an ordered list of typed values.

The order is part of the policy. A plan is compiled in Python and performed by the launcher, which
implements each step and holds no policy. ``Plan.encode()`` produces the format that
``native/plan.c`` decodes.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import ClassVar

from union.sandbox._plan.op_names import OP_NAMES

__all__ = [
    "OP_NAMES",
    "Attrs",
    "Bind",
    "Confine",
    "Counter",
    "Cover",
    "Detach",
    "Devpts",
    "Enter",
    "File",
    "Hostname",
    "Identity",
    "LandlockCreate",
    "LandlockPath",
    "LandlockRestrict",
    "Listen",
    "Lockdown",
    "Mediate",
    "Mkdir",
    "Netlink",
    "Nice",
    "Plan",
    "Proc",
    "Remount",
    "Resize",
    "Rlimit",
    "Root",
    "Seccomp",
    "Share",
    "Slot",
    "SocketOption",
    "Step",
    "Subreaper",
    "Symlink",
    "Terminal",
    "Tmpfs",
    "Unprivileged",
    "Wrap",
    "encode",
    "text",
]

MAGIC = 0x32584253
BIND_EXISTING = 1 << 63
BIND_CLASSIC = 1 << 62
WRAP_USERNS = 1
_HEAD = struct.Struct("=IIII4Q")

RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
"""MOUNT_ATTR_* of mount_setattr(2); the same bits are MS_* of mount(2)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation; subclasses define the integers and byte strings they carry."""

    op: ClassVar[int] = 0

    def integers(self) -> tuple[int, ...]:
        return ()

    def blobs(self) -> tuple[bytes, ...]:
        return ()

    def encode(self) -> bytes:
        a = (*self.integers(), 0, 0, 0, 0)[:4]
        d = (*self.blobs(), b"", b"")[:2]
        head = _HEAD.pack(self.op, len(d[0]), len(d[1]), 0, *a)
        return head + b"".join(blob + bytes(-len(blob) % 8) for blob in d)


def text(path: str) -> bytes:
    """Return a text as a plan carries it."""
    return path.encode("utf-8", "surrogateescape") + b"\0"


@dataclass(frozen=True, slots=True)
class _PathStep(Step):
    path: str

    def blobs(self) -> tuple[bytes, ...]:
        return (text(self.path),)


@dataclass(frozen=True, slots=True)
class Bind(Step):
    """Mount ``source`` at ``path``, with everything mounted below it.

    ``fd`` and ``idmap`` are indices into the file descriptors sent with the plan; with ``fd`` the
    source is that file descriptor. ``identity`` (device, inode) must match, or the step fails.
    ``existing``: ``path`` must exist, and is not created; it is a directory of the host.
    ``classic``: use mount(2) alone; ``attrs`` then do not apply to mounts below ``path``.
    """

    op: ClassVar[int] = 1
    source: str
    path: str
    attrs: int = RDONLY | NOSUID | NODEV
    fd: int | None = None
    idmap: int | None = None
    identity: tuple[int, int] = (0, 0)
    existing: bool = False
    classic: bool = False

    def integers(self) -> tuple[int, ...]:
        fd = 0 if self.fd is None else self.fd + 1
        idmap = 0 if self.idmap is None else self.idmap + 1
        return (
            self.attrs
            | (BIND_EXISTING if self.existing else 0)
            | (BIND_CLASSIC if self.classic else 0),
            *self.identity,
            idmap << 32 | fd,
        )

    def blobs(self) -> tuple[bytes, ...]:
        return text(self.source), text(self.path)


@dataclass(frozen=True, slots=True)
class Root(Step):
    """Mount a tmpfs over ``path``, to become the private root."""

    op: ClassVar[int] = 2
    path: str
    options: str

    def blobs(self) -> tuple[bytes, ...]:
        return text(self.path), text(self.options)


@dataclass(frozen=True, slots=True)
class Mkdir(_PathStep):
    op: ClassVar[int] = 3
    mode: int = 0o755

    def integers(self) -> tuple[int, ...]:
        return (self.mode,)


@dataclass(frozen=True, slots=True)
class File(_PathStep):
    op: ClassVar[int] = 4
    content: bytes = b""
    mode: int = 0o444

    def integers(self) -> tuple[int, ...]:
        return (self.mode,)

    def blobs(self) -> tuple[bytes, ...]:
        return text(self.path), self.content


@dataclass(frozen=True, slots=True)
class Symlink(_PathStep):
    op: ClassVar[int] = 5
    target: str = ""

    def blobs(self) -> tuple[bytes, ...]:
        return text(self.target), text(self.path)


@dataclass(frozen=True, slots=True)
class Tmpfs(_PathStep):
    op: ClassVar[int] = 6
    size_bytes: int = 0
    mode: int = 0o1777
    inodes: int = 65536
    read_only: bool = False

    def integers(self) -> tuple[int, ...]:
        return (NOSUID | NODEV | (RDONLY if self.read_only else 0),)

    @property
    def options(self) -> str:
        return f"mode={self.mode:o},size={self.size_bytes},nr_inodes={self.inodes}"

    def blobs(self) -> tuple[bytes, ...]:
        return text(self.path), text(self.options)


@dataclass(frozen=True, slots=True)
class Proc(_PathStep):
    op: ClassVar[int] = 7


@dataclass(frozen=True, slots=True)
class Devpts(_PathStep):
    op: ClassVar[int] = 8
    # Limited, because all terminals of the host come from one pool.
    options: str = "newinstance,ptmxmode=0666,mode=620,max=64"

    def blobs(self) -> tuple[bytes, ...]:
        return text(self.path), text(self.options)


@dataclass(frozen=True, slots=True)
class Remount(_PathStep):
    op: ClassVar[int] = 9
    flags: int = RDONLY | NOSUID | NODEV

    def integers(self) -> tuple[int, ...]:
        return (self.flags,)


@dataclass(frozen=True, slots=True)
class Hostname(_PathStep):
    op: ClassVar[int] = 10


@dataclass(frozen=True, slots=True)
class Netlink(Step):
    op: ClassVar[int] = 11
    protocol: int
    message: bytes
    acks: int

    def integers(self) -> tuple[int, ...]:
        return self.protocol, self.acks

    def blobs(self) -> tuple[bytes, ...]:
        return (self.message,)


@dataclass(frozen=True, slots=True)
class SocketOption(Step):
    """Set an option, through a socket of its own, that acts on the whole network namespace."""

    op: ClassVar[int] = 31
    domain: int
    kind: int
    protocol: int
    level: int
    option: int
    value: bytes

    def integers(self) -> tuple[int, ...]:
        return self.domain, self.kind, self.protocol, self.level << 32 | self.option

    def blobs(self) -> tuple[bytes, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Listen(Step):
    """Bind a socket in the sandbox's network namespace; its descriptor is sent to the host."""

    op: ClassVar[int] = 12
    domain: int
    kind: int
    address: bytes
    backlog: int = 128

    def integers(self) -> tuple[int, ...]:
        return self.domain, self.kind, self.backlog

    def blobs(self) -> tuple[bytes, ...]:
        return (self.address,)


@dataclass(frozen=True, slots=True)
class Slot(_PathStep):
    """Create a file that is filled when the command arrives, through a descriptor opened now."""

    op: ClassVar[int] = 13
    mode: int = 0o444

    def integers(self) -> tuple[int, ...]:
        return (self.mode,)


@dataclass(frozen=True, slots=True)
class Lockdown(Step):
    """Drop every capability from every set, lock securebits, set no_new_privs."""

    op: ClassVar[int] = 14
    securebits: int = 0xEF
    """NOROOT, NO_SETUID_FIXUP, NO_CAP_AMBIENT_RAISE, each locked; KEEP_CAPS locked off."""

    def integers(self) -> tuple[int, ...]:
        return (self.securebits,)


@dataclass(frozen=True, slots=True)
class LandlockCreate(Step):
    op: ClassVar[int] = 15
    handled_fs: int
    handled_net: int
    scoped: int
    attr_size: int

    def integers(self) -> tuple[int, ...]:
        return self.handled_fs, self.handled_net, self.scoped, self.attr_size


@dataclass(frozen=True, slots=True)
class LandlockPath(_PathStep):
    op: ClassVar[int] = 16
    access: int = 0
    identity: tuple[int, int] = (0, 0)
    """(device, inode) that must match, or the step fails; (0, 0): unchecked."""

    def integers(self) -> tuple[int, ...]:
        return self.access, *self.identity


@dataclass(frozen=True, slots=True)
class LandlockRestrict(Step):
    op: ClassVar[int] = 17


@dataclass(frozen=True, slots=True)
class Seccomp(Step):
    op: ClassVar[int] = 18
    program: bytes

    def blobs(self) -> tuple[bytes, ...]:
        return (self.program,)


@dataclass(frozen=True, slots=True)
class Rlimit(Step):
    op: ClassVar[int] = 19
    resource: int
    soft: int
    hard: int

    def integers(self) -> tuple[int, ...]:
        return self.resource, self.soft, self.hard


@dataclass(frozen=True, slots=True)
class Subreaper(Step):
    op: ClassVar[int] = 20


@dataclass(frozen=True, slots=True)
class Detach(Step):
    """Unmount the caller's root; until then the kernel can check its /proc."""

    op: ClassVar[int] = 21


@dataclass(frozen=True, slots=True)
class Enter(Step):
    """Make the tmpfs of ``Root`` the root: by pivot_root, or by moving it over the caller's.

    A moved root leaves the caller's mounted below it, so there is nothing to detach.
    """

    op: ClassVar[int] = 26
    move: bool = False

    def integers(self) -> tuple[int, ...]:
        return (int(self.move),)


@dataclass(frozen=True, slots=True)
class Cover(_PathStep):
    """Mount ``file``, which is part of the private root, read-only over the file at ``path``."""

    op: ClassVar[int] = 27
    file: str = ""

    def blobs(self) -> tuple[bytes, ...]:
        return text(self.path), text(self.file)


@dataclass(frozen=True, slots=True)
class Counter(_PathStep):
    """Set a limit of the user namespace; ``path`` names a file in /proc/sys/user."""

    op: ClassVar[int] = 28
    value: int = 0

    def integers(self) -> tuple[int, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Identity(_PathStep):
    """Fail unless ``path`` has this (device, inode).

    With ``mounted``, it must also be a mount point, and no component may be a link.
    """

    op: ClassVar[int] = 22
    identity: tuple[int, int]
    mounted: bool = False

    def integers(self) -> tuple[int, ...]:
        return *self.identity, int(self.mounted)


@dataclass(frozen=True, slots=True)
class Attrs(_PathStep):
    """Add restricting flags to a mount and all mounts below it; removes none."""

    op: ClassVar[int] = 23
    attrs: int

    def integers(self) -> tuple[int, ...]:
        return (self.attrs,)


@dataclass(frozen=True, slots=True)
class Resize(_PathStep):
    """Set the limits of a tmpfs that another program has mounted."""

    op: ClassVar[int] = 24
    mode: int
    options: str

    def integers(self) -> tuple[int, ...]:
        return NOSUID | NODEV, self.mode

    def blobs(self) -> tuple[bytes, ...]:
        return text(self.path), text(self.options)


@dataclass(frozen=True, slots=True)
class Wrap(Step):
    """Execute another program that builds the sandbox and starts the runner; always last.

    ``program`` reads ``args``; the runner performs the steps ``inside``. With ``enter`` the program
    gets a user namespace that maps these ids, (inside, outside) of the user and the group.
    """

    op: ClassVar[int] = 25
    program: str
    args: tuple[str, ...]
    inside: tuple[Step, ...]
    enter: tuple[tuple[int, int], tuple[int, int]] | None = None

    def integers(self) -> tuple[int, ...]:
        if self.enter is None:
            return ()
        return WRAP_USERNS, *(inside << 32 | outside for inside, outside in self.enter)

    def blobs(self) -> tuple[bytes, ...]:
        return b"".join(map(text, (self.program, *self.args))), encode(self.inside)


@dataclass(frozen=True, slots=True)
class Share(Step):
    """Send the namespaces to the host, for sandboxes that start from a copy; always last.

    With ``machine``, for commands that join them: the process stays, as the first of the machine.
    """

    op: ClassVar[int] = 30
    machine: bool = False

    def integers(self) -> tuple[int, ...]:
        return (int(self.machine),)


@dataclass(frozen=True, slots=True)
class Terminal(Step):
    """Open a terminal for the command, which cannot open one itself."""

    op: ClassVar[int] = 40


@dataclass(frozen=True, slots=True)
class Confine(Step):
    """Divide the steps: later ones are performed by the process of the command alone."""

    op: ClassVar[int] = 41


@dataclass(frozen=True, slots=True)
class Unprivileged(Step):
    """Clear the capability sets that an unprivileged process can clear; set no_new_privs."""

    op: ClassVar[int] = 42


@dataclass(frozen=True, slots=True)
class Nice(Step):
    """Lower the priority by ``value``."""

    op: ClassVar[int] = 43
    value: int

    def integers(self) -> tuple[int, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Mediate(Step):
    """Install a filter whose notifications the runner performs.

    ``roots`` are the paths below which it changes modes and times. With ``connect`` it requests
    TCP connections from the host; without, it refuses them.
    """

    op: ClassVar[int] = 44
    program: bytes
    roots: tuple[str, ...]
    connect: bool = False

    def integers(self) -> tuple[int, ...]:
        return (int(self.connect),)

    def blobs(self) -> tuple[bytes, ...]:
        return self.program, b"".join(map(text, self.roots))


def encode(steps: tuple[Step, ...]) -> bytes:
    """Return the steps in the format of the launcher."""
    return struct.pack("=II", MAGIC, len(steps)) + b"".join(map(_encoded, steps))


@functools.lru_cache(maxsize=1024)
def _encoded(step: Step) -> bytes:
    """Return one encoded step, cached since most are the same for all sessions."""
    return step.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps, the namespaces they are performed in, and the identity inside."""

    steps: tuple[Step, ...]
    clone_flags: int
    uid: tuple[int, int] | None = None
    """(inside, outside); None: no user namespace."""
    gid: tuple[int, int] | None = None
    deny_setgroups: bool = False
    shared: Plan | None = None
    """The plan performed once, ahead; ``steps`` start from a copy of its namespaces."""
    machine: Plan | None = None
    """The plan of the machine that ``steps`` join, which starts from a copy of ``shared``."""
    network: int = 0
    """With a shared part: the number of leading steps that set up a network namespace which a later
    sandbox of the session may reuse."""

    @property
    def is_wrapped(self) -> bool:
        """Whether another program builds the sandbox."""
        return bool(self.steps) and isinstance(self.steps[-1], Wrap)

    def encode(self) -> bytes:
        return encode(self.steps)

"""Plans: what the launcher does to build a sandbox, as an ordered list of typed steps.

The order is the policy. A plan is compiled here, in Python, and performed by the launcher, which
knows how to do each step and nothing else. ``Plan.encode()`` is the wire format that
``native/plan.c`` decodes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

__all__ = [
    "OP_NAMES",
    "Bind",
    "Detach",
    "Devpts",
    "File",
    "Hostname",
    "LandlockCreate",
    "LandlockPath",
    "LandlockRestrict",
    "Listen",
    "Lockdown",
    "Mkdir",
    "Netlink",
    "Plan",
    "Proc",
    "Remount",
    "Rlimit",
    "Root",
    "Seccomp",
    "Slot",
    "Step",
    "Subreaper",
    "Symlink",
    "Tmpfs",
]

_MAGIC = 0x32584253
_HEAD = struct.Struct("=IIII4Q")

RDONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8
"""MOUNT_ATTR_* of mount_setattr(2); the same bits are MS_* of mount(2)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation; subclasses say which integers and byte strings they carry."""

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


def _text(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape") + b"\0"


@dataclass(frozen=True, slots=True)
class _PathStep(Step):
    path: str

    def blobs(self) -> tuple[bytes, ...]:
        return (_text(self.path),)


@dataclass(frozen=True, slots=True)
class Bind(Step):
    """Shows ``source`` at ``path``, with everything mounted below it.

    ``fd`` and ``idmap`` are indices into the descriptors that travel with the plan; with ``fd`` the
    source is that descriptor. ``identity`` (device, inode) must match, or the step fails.
    """

    op: ClassVar[int] = 1
    source: str
    path: str
    attrs: int = RDONLY | NOSUID | NODEV
    fd: int | None = None
    idmap: int | None = None
    identity: tuple[int, int] = (0, 0)

    def integers(self) -> tuple[int, ...]:
        fd = 0 if self.fd is None else self.fd + 1
        idmap = 0 if self.idmap is None else self.idmap + 1
        return (self.attrs, *self.identity, idmap << 32 | fd)

    def blobs(self) -> tuple[bytes, ...]:
        return _text(self.source), _text(self.path)


@dataclass(frozen=True, slots=True)
class Root(Step):
    """A private tmpfs root, mounted over ``path`` and entered at once."""

    op: ClassVar[int] = 2
    path: str
    options: str

    def blobs(self) -> tuple[bytes, ...]:
        return _text(self.path), _text(self.options)


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
        return _text(self.path), self.content


@dataclass(frozen=True, slots=True)
class Symlink(_PathStep):
    op: ClassVar[int] = 5
    target: str = ""

    def blobs(self) -> tuple[bytes, ...]:
        return _text(self.target), _text(self.path)


@dataclass(frozen=True, slots=True)
class Tmpfs(_PathStep):
    op: ClassVar[int] = 6
    size_bytes: int = 0
    mode: int = 0o1777
    inodes: int = 65536

    def integers(self) -> tuple[int, ...]:
        return (NOSUID | NODEV,)

    def blobs(self) -> tuple[bytes, ...]:
        options = f"mode={self.mode:o},size={self.size_bytes},nr_inodes={self.inodes}"
        return _text(self.path), _text(options)


@dataclass(frozen=True, slots=True)
class Proc(_PathStep):
    op: ClassVar[int] = 7


@dataclass(frozen=True, slots=True)
class Devpts(_PathStep):
    op: ClassVar[int] = 8
    options: str = "newinstance,ptmxmode=0666,mode=620"

    def blobs(self) -> tuple[bytes, ...]:
        return _text(self.path), _text(self.options)


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
class Listen(Step):
    """A socket bound inside the sandbox's network namespace; its descriptor goes to the host."""

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
    """A file that is filled when the command is known, through a descriptor opened now."""

    op: ClassVar[int] = 13
    mode: int = 0o444

    def integers(self) -> tuple[int, ...]:
        return (self.mode,)


@dataclass(frozen=True, slots=True)
class Lockdown(Step):
    """No capability in any set, no way to get one back, no_new_privs."""

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

    def integers(self) -> tuple[int, ...]:
        return (self.access,)


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
    """Lets go of the caller's root; until here the kernel may look at its /proc."""

    op: ClassVar[int] = 21


OP_NAMES: dict[int, str] = {
    1: "bind mount",
    2: "private root",
    3: "directory",
    4: "file",
    5: "link",
    6: "tmpfs",
    7: "fresh /proc",
    8: "pseudo-terminals",
    9: "remount",
    10: "host name",
    11: "network set-up",
    12: "network door",
    13: "script file",
    14: "dropping privileges",
    15: "Landlock rule set",
    16: "Landlock rule",
    17: "Landlock",
    18: "system-call filter",
    19: "limit",
    20: "reaper",
    21: "leaving the caller's root",
    100: "plan",
    101: "namespaces",
    102: "id-mapped mount",
    103: "control group",
    104: "user and group ids",
    105: "private mounts",
    106: "descriptors",
    107: "request",
    108: "script",
    109: "fork",
    110: "working directory",
    111: "program",
    112: "standard streams",
    113: "terminal",
}
"""What each operation is called in an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps, the namespaces they are performed in, and the identity inside."""

    steps: tuple[Step, ...]
    clone_flags: int
    uid: tuple[int, int] | None = None
    """(inside, outside); None: no user namespace."""
    gid: tuple[int, int] | None = None
    deny_setgroups: bool = False

    def encode(self) -> bytes:
        head = struct.pack("=II", _MAGIC, len(self.steps))
        return head + b"".join(step.encode() for step in self.steps)

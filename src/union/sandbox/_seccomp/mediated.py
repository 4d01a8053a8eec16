"""The second filter of sandboxes without namespaces: it refuses, or notifies, what those separate.

``filter.py`` compiles the filter that every sandbox has. A process of the ``landlock`` backend also
shares the network, the process table and the file system of its host. Landlock guards file
contents, TCP ports and, from ABI 6 on, signals. It does not cover metadata, limits, priorities,
watches, local sockets, addresses, UDP and listening. Each of these is refused here, or passed as a
notification to the runner, which performs it (``native/mediator.c``).

The rules of ``filter.py`` apply here too.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from union.sandbox._seccomp.bpf import (
    ALLOW,
    ENOSYS,
    EPERM,
    EPROTONOSUPPORT,
    JEQ,
    JSET,
    LOW,
    Branch,
    Load,
    Node,
    Return,
)
from union.sandbox._seccomp.filter import compile_decisions
from union.sandbox._seccomp.syscalls import MACHINES, numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["mediated_numbers", "mediated_program"]

NOTIFY: Final = Return(0x7FC0_0000)
_EACCES: Final = Return(0x0005_0000 | 13)
_ENOTTY: Final = Return(0x0005_0000 | 25)
_EOPNOTSUPP: Final = Return(0x0005_0000 | 95)

# name: (x86_64, aarch64), beyond the table of the first filter.
_TABLE: Final[Mapping[str, tuple[int | None, int | None]]] = MappingProxyType(
    {
        "shmat": (30, 196),
        "shmctl": (31, 195),
        "connect": (42, 203),
        "sendto": (44, 206),
        "sendmsg": (46, 211),
        "listen": (50, 201),
        "kill": (62, 129),
        "semget": (64, 190),
        "semop": (65, 193),
        "semctl": (66, 191),
        "msgget": (68, 186),
        "msgsnd": (69, 189),
        "msgrcv": (70, 188),
        "msgctl": (71, 187),
        "chown": (92, None),
        "fchown": (93, 55),
        "lchown": (94, None),
        "rt_sigqueueinfo": (129, 138),
        "utime": (132, None),
        "setpriority": (141, 140),
        "sched_setparam": (142, 118),
        "sched_setscheduler": (144, 119),
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "removexattr": (197, 14),
        "lremovexattr": (198, 15),
        "fremovexattr": (199, 16),
        "tkill": (200, 130),
        "sched_setaffinity": (203, 122),
        "semtimedop": (220, 192),
        "tgkill": (234, 131),
        "utimes": (235, None),
        "mq_open": (240, 180),
        "mq_unlink": (241, 181),
        "ioprio_set": (251, 30),
        "inotify_add_watch": (254, 27),
        "fchownat": (260, 54),
        "futimesat": (261, None),
        "utimensat": (280, 88),
        "rt_tgsigqueueinfo": (297, 240),
        "sendmmsg": (307, 269),
        "sched_setattr": (314, 274),
        "pidfd_send_signal": (424, 424),
        "setxattrat": (463, 463),
        "removexattrat": (466, 466),
        "file_setattr": (469, 469),
    }
)

_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_TYPE_MASK = 1, 2, 0xF
_MSG_FASTOPEN: Final = 0x2000_0000
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_SET_OWNER: Final = (8, 15)
"""F_SETOWN and F_SETOWN_EX of fcntl, which make the kernel signal another process."""

_IOCTLS: Final = (
    # Terminals: modes, size, process groups, the controlling terminal.
    0x5401, 0x5402, 0x5403, 0x5404, 0x5409, 0x540A, 0x540B, 0x540E, 0x540F, 0x5410, 0x5411, 0x5413,
    0x5414, 0x5422, 0x5425, 0x5429, 0x802C542A, 0x402C542B, 0x402C542C, 0x402C542D,
    # Any descriptor: bytes to read, blocking, close-on-exec.
    0x541B, 0x5421, 0x5450, 0x5451,
    # Cloning of file ranges into a file that is open for writing.
    0x40049409, 0x4020940D,
)  # fmt: skip
"""An allow-list: requests such as those of fs-verity change files that are open for reading."""

_OWN_METADATA: Final = (
    "chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "futimesat", "utimensat",
)  # fmt: skip
_OWNERS: Final = ("chown", "fchown", "lchown", "fchownat")
_ATTRIBUTES: Final = (
    "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
)  # fmt: skip
_QUEUES: Final = (
    "shmget", "shmat", "shmctl", "semget", "semop", "semctl", "semtimedop",
    "msgget", "msgsnd", "msgrcv", "msgctl", "mq_open", "mq_unlink",
)  # fmt: skip
_OF_PROCESS: Final = (
    "prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr",
)  # fmt: skip
_SIGNALS: Final = (
    "kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal",
)  # fmt: skip


def mediated_numbers(*, machine: str) -> dict[str, int]:
    """Return every call that either filter decides about, as name -> number."""
    column = MACHINES.index(machine)
    own = {name: row[column] for name, row in _TABLE.items()}
    found = {name: number for name, number in own.items() if number is not None}
    return numbers(machine=machine) | found


def _one_of(values: tuple[int, ...], *, then: Node, other: Node) -> Node:
    node = other
    for value in reversed(values):
        node = Branch(JEQ, value, then, node)
    return node


def _no_datagrams() -> Node:
    """Refuse local datagram sockets: each message names a destination behind a pointer.

    Raw ones, of which the kernel makes datagram sockets, are refused by the first filter.
    """
    return Load(LOW[1], Branch(JEQ, _SOCK_DGRAM, EPROTONOSUPPORT, ALLOW), mask=_SOCK_TYPE_MASK)


def _socket(network: str) -> Node:
    internet: Node = _EACCES
    if network == "filtered":
        internet = Load(LOW[1], Branch(JEQ, _SOCK_STREAM, ALLOW, _EACCES), mask=_SOCK_TYPE_MASK)
    families = _one_of((_AF_INET, _AF_INET6), then=internet, other=_EACCES)
    return Load(LOW[0], Branch(JEQ, _AF_UNIX, _no_datagrams(), families))


def _without_fast_open(argument: int) -> Node:
    return Load(LOW[argument], Branch(JSET, _MSG_FASTOPEN, _EACCES, ALLOW))


def _sendto() -> Node:
    without_address = Load(LOW[4] + 4, Branch(JEQ, 0, _without_fast_open(3), _EACCES))
    return Load(LOW[4], Branch(JEQ, 0, without_address, _EACCES))


def _own_process(argument: int) -> Node:
    """Allow a call for the caller itself, which 0 means."""
    return Load(LOW[argument], Branch(JEQ, 0, ALLOW, EPERM))


def _network(shape: str) -> dict[str, Node]:
    if shape == "open":
        # Connections are the host's. Without local sockets, none of the host's can be reached.
        unix = Load(LOW[0], Branch(JEQ, _AF_UNIX, _EACCES, ALLOW))
        return {"socket": unix, "socketpair": _no_datagrams()}
    rules: dict[str, Node] = {
        "socket": _socket(shape),
        "socketpair": _no_datagrams(),
        "connect": NOTIFY,
        "sendto": _sendto(),
        "sendmsg": _without_fast_open(2),
        "sendmmsg": _without_fast_open(3),
    }
    if shape == "filtered":
        # Without a bind before it, listen takes any port of the host, which Landlock does not see.
        rules["listen"] = _EACCES
    return rules


def mediated_program(*, machine: str, network: str, shares_id: bool, abi: int) -> bytes:
    """Compile the filter to a packed array of ``struct sock_filter``.

    Args:
        machine: the architecture.
        network: the shape of the network: ``blocked``, ``filtered`` or ``open``.
        shares_id: whether other processes and files have the id of the sandbox.
        abi: the Landlock ABI of the kernel; from 6 on Landlock confines signals.

    """
    decisions = _network(network)
    decisions |= dict.fromkeys(_QUEUES, ENOSYS)
    decisions |= dict.fromkeys(_OF_PROCESS, _own_process(0))
    for name, which in (("setpriority", _PRIO_PROCESS), ("ioprio_set", _IOPRIO_WHO_PROCESS)):
        decisions[name] = Load(LOW[0], Branch(JEQ, which, _own_process(1), EPERM))
    decisions["ioctl"] = Load(LOW[1], _one_of(_IOCTLS, then=ALLOW, other=_ENOTTY))
    decisions["inotify_add_watch"] = _EACCES
    decisions["file_setattr"] = ENOSYS
    # Without an owner and a group, anyone may call chown: it changes the time of the last change.
    decisions |= dict.fromkeys(_OWNERS, EPERM)
    if shares_id:
        decisions |= dict.fromkeys(_OWN_METADATA, NOTIFY)
        decisions |= dict.fromkeys(_ATTRIBUTES, _EOPNOTSUPP)
    if abi < 6:
        decisions |= dict.fromkeys(_SIGNALS, NOTIFY)
        decisions["fcntl"] = Load(LOW[1], _one_of(_SET_OWNER, then=EPERM, other=ALLOW))
    return compile_decisions(decisions, mediated_numbers(machine=machine), machine=machine)

"""The launcher's protocol: messages, flags, failure places and structures of ``native/sbx.h``.

All Python code that exchanges messages with the launcher, or with the first process of a sandbox,
takes its numbers from here. ``tests/unit/test_protocol.py`` compares them with the header. The
numbers of plan steps are in ``_plan/plan.py``, beside the steps.

The flags are IntEnum, not IntFlag: their combination is a plain int, which costs nothing on the
path of a run.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from union.sandbox._plan.plan import OP_NAMES

__all__ = [
    "BEGIN",
    "CONNECT",
    "EXEC",
    "EXITED",
    "FAILURE_NAMES",
    "MEMORY",
    "PREPARE",
    "RLIMIT",
    "SIMPLE",
    "SLOT_FD",
    "WAIT_FD",
    "ExecFlag",
    "FailurePlace",
    "Limit",
    "Message",
    "PrepareFlag",
    "operation",
]


class Limit(IntEnum):
    """Upper bounds of the launcher (``MAX_*``)."""

    STEPS = 768
    FDS = 64
    LISTENERS = 8
    SLOTS = 2
    MESSAGE = 131072
    STRINGS = 65536


class Message(IntEnum):
    """Message types (``MSG_*``): the first 32 bits of each message."""

    # Host to launcher, on the control socket.
    ATTACH = 1
    USERNS = 2
    # Host to launcher, on a session's channel.
    PREPARE = 10
    KILL = 11
    KILL_ALL = 12
    BEGIN = 13
    LOCATE = 14
    # Launcher to host: on a session's channel; USERNS_READY on the control socket.
    GONE = 20
    ALL_GONE = 21
    USERNS_READY = 22
    PID = 23
    DRAINING = 24
    BEGUN = 25
    # Host to the first process of a sandbox.
    EXEC = 30
    SIGNAL = 31
    CONNECTED = 32
    FOLLOW = 33
    TREE = 34
    # A sandbox, or the launcher on its behalf, to the host.
    READY = 40
    STARTED = 41
    EXITED = 42
    FAILED = 43
    SHARED = 44
    TERMINAL = 45
    MEMORY = 46
    CONNECT = 47
    TREE_DONE = 48
    WAITING = 49


class PrepareFlag(IntEnum):
    """Flags of a PREPARE message (``PREPARE_*``)."""

    DENY_SETGROUPS = 1
    NOTIFY = 2
    MAP_IDS = 4
    REPORT_PID = 8
    WRAPPED = 16
    COPY = 32
    JOIN = 64
    TEMPLATE = 1024
    FORK = 2048


class ExecFlag(IntEnum):
    """Flags of an EXEC message (``EXEC_*``); the first six announce one descriptor each."""

    STDIN = 1
    STDOUT = 2
    STDERR = 4
    SCRIPT = 8
    PAYLOAD = 16
    WAIT = 32
    TTY = 64
    REPORT_START = 128


class FailurePlace(IntEnum):
    """Places outside the steps of a plan where a sandbox can fail (``OP_*`` from 100 on)."""

    PLAN = 100
    CLONE = 101
    IDMAP = 102
    CGROUP = 103
    IDS = 104
    PRIVATE = 105
    FDS = 106
    REQUEST = 107
    SCRIPT = 108
    FORK = 109
    CHDIR = 110
    EXEC = 111
    STDIO = 112
    TTY = 113
    COPY = 114
    PROCESS = 115


FAILURE_NAMES: Final[dict[int, str]] = {
    **OP_NAMES,
    FailurePlace.PLAN: "plan",
    FailurePlace.CLONE: "namespaces",
    FailurePlace.IDMAP: "id-mapped mount",
    FailurePlace.CGROUP: "control group",
    FailurePlace.IDS: "user and group ids",
    FailurePlace.PRIVATE: "private mounts",
    FailurePlace.FDS: "descriptors",
    FailurePlace.REQUEST: "request",
    FailurePlace.SCRIPT: "script",
    FailurePlace.FORK: "fork",
    FailurePlace.CHDIR: "working directory",
    FailurePlace.EXEC: "program",
    FailurePlace.STDIO: "standard streams",
    FailurePlace.TTY: "terminal",
    FailurePlace.COPY: "entering the shared view",
    FailurePlace.PROCESS: "process set-up",
}
"""The name of each operation in an error."""

WAIT_FD: Final = 100
"""The descriptor that a program started ahead of its command waits on."""
SLOT_FD: Final = 101
"""The descriptor of the file that such a program fills with its script."""

SIMPLE: Final = struct.Struct("=IIii")
"""struct simple_msg: type, id, a, b. FAILED: id is the operation, a the errno."""
PREPARE: Final = struct.Struct("=13I")
"""struct prepare_msg: type, id, clone_flags, flags, uid_in, uid_out, gid_in, gid_out, cgroups,
network, processes, signals, template."""
BEGIN: Final = struct.Struct("=6IQ")
"""struct begin_msg of the portable launcher: type, id, flags, args, processes, zero, memory."""
MEMORY: Final = struct.Struct("=IIQ")
"""struct memory_msg of the portable launcher: type, exceeded, peak."""
EXEC: Final = struct.Struct("=10I")
"""struct exec_msg: type, flags, slot, rlimits, programs, argc, envc, size, rows, cols."""
CONNECT: Final = struct.Struct("=4I2Q")
"""struct connect_msg: type, id, family, port, and 16 bytes of address in memory order."""
RLIMIT: Final = struct.Struct("=IIQQ")
"""struct exec_rlimit: resource, zero, soft, hard."""
EXITED: Final = struct.Struct("=IiQQQ")
"""struct exited_msg: type, status, user_us, system_us, maxrss_kib."""

_OPERATION_MASK: Final = 0xFF


def operation(where: int) -> int:
    """Return the operation of a FAILED message's id: its low byte; the rest is a step's index."""
    return where & _OPERATION_MASK

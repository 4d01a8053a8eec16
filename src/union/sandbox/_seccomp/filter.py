"""The seccomp filter: a policy as data, and its compilation to classic BPF.

Rules of this file:

- The list names refused calls; everything else is allowed. Namespaces, dropped capabilities and
  Landlock are the main isolation. The filter removes kernel surface that ordinary programs never
  use, and the few calls that the other layers do not cover.
- Two cheap ways around a deny-list are closed first: another calling convention (i386, x32, 32-bit
  Arm) and a number newer than this table.
- Where the kernel reads an ``int``, only the low 32 bits are compared. Comparing all 64 would let
  a caller bypass the rule by setting bits that the kernel ignores.
- Arguments behind a pointer cannot be read, and could change after the check. Calls that hide
  a relevant argument there return ENOSYS, so that libc falls back to the visible form.
- A path that allows without reading an argument loads only the number and the architecture: from
  Linux 5.11 on the kernel then decides from a bitmap and never runs the filter for that call.
- Kernel constants are defined here, not imported: the ``errno`` and ``socket`` modules describe
  the machine that compiles, which may be another system.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._seccomp.bpf import (
    ALLOW,
    ARCH,
    EINVAL,
    ENOSYS,
    EPERM,
    EPROTONOSUPPORT,
    JEQ,
    JGE,
    JSET,
    LOW,
    NR,
    SUCCESS,
    Branch,
    Load,
    Node,
    assemble,
)
from union.sandbox._seccomp.syscalls import AUDIT_ARCH, MACHINES, NEWEST, X32_BIT, numbers
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Rule", "compile_decisions", "digest", "explain", "filter_program"]


def _any_bit(argument: int, bits: int, *, then: Node, other: Node) -> Node:
    return Load(LOW[argument], Branch(JSET, bits, then, other))


def _one_of(values: tuple[int, ...], *, then: Node, other: Node) -> Node:
    """Compare the accumulator with each value in turn."""
    node = other
    for value in reversed(values):
        node = Branch(JEQ, value, then, node)
    return node


# --- refused whatever the arguments -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of the policy: a call, its verdict, and the reason."""

    name: str
    verdict: str
    reason: str


# (verdict, reason, calls). The verdict is EPERM, or ENOSYS where callers then use a fallback.
_REFUSED: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "EPERM",
        "changes the view of the file system that the sandbox is made of",
        "mount umount2 pivot_root chroot open_tree open_tree_attr move_mount mount_setattr",
    ),
    ("EPERM", "file-system parsers, to be fed by the caller", "fsopen fsconfig fsmount fspick"),
    (
        "ENOSYS",
        "young parsers over the mount table; /proc/self/mountinfo remains, and libraries use it",
        "statmount listmount",
    ),
    ("EPERM", "enters a namespace that the caller did not start in", "setns"),
    (
        "ENOSYS",
        "its flags are behind a pointer; libc falls back to clone, whose flags can be judged",
        "clone3",
    ),
    (
        "EPERM",
        "reads, changes or compares another process",
        "ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp",
    ),
    ("EPERM", "gives up another process's memory", "process_madvise process_mrelease"),
    ("EPERM", "large in-kernel machine with a record of exploits", "bpf perf_event_open"),
    ("EPERM", "holds kernel copies open at a chosen point: exploit staging", "userfaultfd"),
    (
        "EPERM",
        "opens files and sockets from a shared ring, where this filter does not look",
        "io_uring_setup io_uring_enter io_uring_register",
    ),
    (
        "EPERM",
        "keyrings are not namespaced: data would outlive the run",
        "keyctl add_key request_key",
    ),
    (
        "EPERM",
        "loads or inspects kernel code",
        "init_module finit_module delete_module create_module get_kernel_syms query_module",
    ),
    ("EPERM", "replaces the running kernel", "kexec_load kexec_file_load"),
    ("EPERM", "controls the whole machine", "reboot swapon swapoff acct vhangup"),
    (
        "EPERM",
        "sets or disciplines the host's clock; reading needs none of these",
        "settimeofday clock_settime clock_adjtime adjtimex",
    ),
    ("EPERM", "raw ports and segment tables: old x86 corners", "iopl ioperm modify_ldt"),
    ("EPERM", "disk quota administration", "quotactl quotactl_fd"),
    (
        "EPERM",
        "names files by handle, past every path rule; making a handle is the first half",
        "open_by_handle_at name_to_handle_at",
    ),
    (
        "EPERM",
        "watches whole file systems, the host's part included",
        "fanotify_init fanotify_mark",
    ),
    ("EPERM", "reads or clears the host's kernel log", "syslog"),
    ("EPERM", "the name is set at start and reported to the caller", "sethostname setdomainname"),
    (
        "EPERM",
        "obsolete; most kernels have dropped it and none of its users are left",
        "nfsservctl lookup_dcookie _sysctl uselib ustat sysfs",
    ),
    (
        "EPERM",
        "moves pages, also shared ones and other processes', between memory nodes",
        "move_pages migrate_pages",
    ),
    ("EPERM", "changes the security label of the caller", "lsm_set_self_attr"),
    (
        "EPERM",
        "pinned memory outside the kernel's own map; it also stops the host from hibernating",
        "memfd_secret",
    ),
    (
        "EPERM",
        "tells which pages of a shared file others have used: a side channel",
        "cachestat",
    ),
    (
        "ENOSYS",
        "native AIO: one pool for the whole machine, and requests that no signal interrupts",
        "io_setup io_destroy io_submit io_cancel io_getevents io_pgetevents",
    ),
)

_VERDICTS: Final = {"EPERM": EPERM, "ENOSYS": ENOSYS}


# --- refused by argument ------------------------------------------------------------------------

_CLONE_NEW: Final = 0x7E02_0000
"""NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. NEWTIME (0x80) lies in the bits where
``clone`` keeps the exit signal, so only ``unshare`` and ``clone3`` can ask for it."""

_UNSHARE_ALLOWED: Final = 0x0005_0F00
"""VM, FS, FILES, SIGHAND, THREAD, SYSVSEM: the flags that make no namespace. An allow-list here,
because the flag space of ``unshare`` still grows."""

_U32: Final = 0xFFFF_FFFF
_SET_ID: Final = 0o6000
_CREATING: Final = 0x40 | 0x40_0000
"""O_CREAT and the bit specific to O_TMPFILE; without them the kernel ignores the mode."""

_S_IFMT, _S_IFCHR, _S_IFBLK = 0o170000, 0o020000, 0o060000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_TYPE_MASK: Final = 0xF
_SOCK_STREAM, _SOCK_DGRAM, _SOCK_RAW, _SOCK_PACKET = 1, 2, 3, 10
_TERMINAL_IOCTLS: Final = (0x5412, 0x541C, 0x541D, 0x5423)
"""TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD."""
_CONSOLE_IOCTLS: Final = (0x4B00, 0x5600)
"""The first of KD* and VT*, which fill the low byte: keyboard, fonts and switching of a console."""
_LEASES: Final = (1024, 1026, 1040)
"""F_SETLEASE, F_NOTIFY, F_SETDELEG."""
_F_SETSIG: Final = 10
_SIGIO: Final = 29
_O_ACCMODE, _O_TRUNC = 0o3, 0o1000
_RLIMIT_CORE: Final = 4
_MAX_UNCOUNTED_SEGMENT: Final = 4096


def _unshare() -> Node:
    high = Load(LOW[0] + 4, Branch(JEQ, 0, ALLOW, EPERM))
    return _any_bit(0, _U32 & ~_UNSHARE_ALLOWED, then=EPERM, other=high)


def _socket(local_datagram: Node = ALLOW) -> Node:
    stream = Load(LOW[2], _one_of((0, 6), then=ALLOW, other=EPERM))
    datagram = Load(LOW[2], _one_of((0, 17, 1, 58), then=ALLOW, other=EPERM))
    by_type = Branch(JEQ, _SOCK_STREAM, stream, Branch(JEQ, _SOCK_DGRAM, datagram, EPERM))
    internet = Load(LOW[1], by_type, mask=_SOCK_TYPE_MASK)
    route = Load(LOW[2], Branch(JEQ, 0, ALLOW, EPERM))
    rest = Branch(JEQ, _AF_NETLINK, route, EPERM)
    others = _one_of((_AF_INET, _AF_INET6), then=internet, other=rest)
    return Load(LOW[0], Branch(JEQ, _AF_UNIX, _local(local_datagram), others))


def _local(datagram: Node) -> Node:
    """Judge the type of a local socket. The kernel makes a datagram socket of a raw one."""
    raw = _one_of((_SOCK_RAW, _SOCK_PACKET), then=EPERM, other=ALLOW)
    return Load(LOW[1], Branch(JEQ, _SOCK_DGRAM, datagram, raw), mask=_SOCK_TYPE_MASK)


def _socketpair(local_datagram: Node = ALLOW) -> Node:
    return Load(LOW[0], Branch(JEQ, _AF_UNIX, _local(local_datagram), EPERM))


def _ioctl() -> Node:
    console = _one_of(_CONSOLE_IOCTLS, then=EPERM, other=ALLOW)
    groups = Load(LOW[1], console, mask=_U32 & ~0xFF)
    return Load(LOW[1], _one_of(_TERMINAL_IOCTLS, then=EPERM, other=groups))


def _is_null(argument: int, *, then: Node, other: Node) -> Node:
    high = Load(LOW[argument] + 4, Branch(JEQ, 0, then, other))
    return Load(LOW[argument], Branch(JEQ, 0, high, other))


def _prlimit() -> Node:
    """Allow reading. A call that sets and reads at once cannot be simulated."""
    setting = _is_null(3, then=SUCCESS, other=EPERM)
    core = _is_null(2, then=ALLOW, other=setting)
    return Load(LOW[1], Branch(JEQ, _RLIMIT_CORE, core, ALLOW))


def _small_segment() -> Node:
    small = Load(LOW[1], Branch(JGE, _MAX_UNCOUNTED_SEGMENT + 1, EINVAL, ALLOW))
    return Load(LOW[1] + 4, Branch(JEQ, 0, small, EINVAL))


def _mknod(argument: int, *, allow_setid_modes: bool) -> Node:
    device = _one_of((_S_IFCHR, _S_IFBLK), then=EPERM, other=ALLOW)
    kind = Load(LOW[argument], device, mask=_S_IFMT)
    return kind if allow_setid_modes else _any_bit(argument, _SET_ID, then=EPERM, other=kind)


def _mode(argument: int) -> Node:
    return _any_bit(argument, _SET_ID, then=EPERM, other=ALLOW)


def _open(argument: int) -> Node:
    return _any_bit(argument, _CREATING, then=_mode(argument + 1), other=ALLOW)


_SET_ID_REASON: Final = "a set-id file left behind would act with its owner's rights on the host"
_NODE_REASON: Final = "device nodes reach the host's hardware"
_CORE_REASON: Final = (
    "with the value 1 a crash starts no core dump program of the host; every other value would"
)

# (rule, decision tree); the same rows feed the compiler and the documentation.
_BY_ARGUMENT: Final[tuple[tuple[Rule, Node], ...]] = (
    (
        Rule(
            name="clone",
            verdict="EPERM with any namespace flag",
            reason="capabilities in a new user namespace open most of the kernel's surface",
        ),
        _any_bit(0, _CLONE_NEW, then=EPERM, other=ALLOW),
    ),
    (
        Rule(
            name="unshare",
            verdict="EPERM unless it only separates files, directory, memory or semaphores",
            reason="capabilities in a new user namespace open most of the kernel's surface",
        ),
        _unshare(),
    ),
    (
        Rule(
            name="personality",
            verdict="EPERM unless it asks (0xffffffff) or sets the default (0)",
            reason="other values weaken address randomisation and page protection",
        ),
        Load(LOW[0], _one_of((0, _U32), then=ALLOW, other=EPERM)),
    ),
    (
        Rule(
            name="ioctl",
            verdict="EPERM for TIOCSTI, TIOCLINUX, TIOCCONS, TIOCSETD, KD* and VT*",
            reason="types into a terminal, pastes on the console, takes it over, loads line "
            "disciplines",
        ),
        _ioctl(),
    ),
    (
        Rule(
            name="fcntl",
            verdict="EPERM for F_SETLEASE, F_SETDELEG, F_NOTIFY",
            reason="a lease on a file makes the host wait in open(); a directory watch needs no "
            "instance that could be counted",
        ),
        Load(LOW[1], _one_of(_LEASES, then=EPERM, other=ALLOW)),
    ),
    (
        Rule(
            name="setrlimit",
            verdict="returns 0 without effect for RLIMIT_CORE",
            reason=_CORE_REASON,
        ),
        Load(LOW[0], Branch(JEQ, _RLIMIT_CORE, SUCCESS, ALLOW)),
    ),
    (
        Rule(
            name="prlimit64",
            verdict="returns 0 without effect when it sets RLIMIT_CORE; EPERM if it also reads it",
            reason=_CORE_REASON,
        ),
        _prlimit(),
    ),
    (
        Rule(
            name="socket",
            verdict="EPERM unless local, TCP, UDP, ping or route netlink",
            reason="rare families and raw sockets are where kernel bugs are reached from",
        ),
        _socket(),
    ),
    (
        Rule(
            name="socketpair",
            verdict="EPERM unless local and not raw",
            reason="rare families and types are where kernel bugs are reached from",
        ),
        _socketpair(),
    ),
)

# Used only where the sandbox has the id of its caller, whose descriptors in flight are counted
# together with its own.
_COUNTED_MESSAGES: Final[tuple[tuple[Rule, Node], ...]] = tuple(
    (
        Rule(
            name=f"{name} of an ordinary caller",
            verdict="EPROTONOSUPPORT also for local datagrams",
            reason="a message with descriptors that waits for a full queue is past the limit",
        ),
        node,
    )
    for name, node in {
        "socket": _socket(EPROTONOSUPPORT),
        "socketpair": _socketpair(EPROTONOSUPPORT),
    }.items()
)

# Used only where a memory limit is enforced by polling, which sees mappings and mounts.
_UNCOUNTED: Final[tuple[tuple[Rule, Node], ...]] = (
    (
        Rule(
            name="memfd_create",
            verdict="ENOSYS where the memory limit is enforced by a watch",
            reason="its pages need not be mapped by any process; callers fall back to /dev/shm",
        ),
        ENOSYS,
    ),
    (
        Rule(
            name="shmget",
            verdict=f"EINVAL above {_MAX_UNCOUNTED_SEGMENT} bytes where the memory limit is "
            "enforced by a watch",
            reason="a segment need not be mapped by any process",
        ),
        _small_segment(),
    ),
)

_INIT_REASON: Final = "this kernel lets process 1 be killed from inside, which would end the run"

# Used only where the kernel does not protect the first process of a pid namespace (gVisor).
_GUARDED_INIT: Final[tuple[tuple[Rule, Node], ...]] = (
    (
        Rule(
            name="kill",
            verdict="EPERM for process 1 in gVisor, except signal 0 and SIGIO",
            reason=_INIT_REASON,  # SIGIO only makes it check for messages
        ),
        Load(
            LOW[0],
            Branch(JEQ, 1, Load(LOW[1], _one_of((0, _SIGIO), then=ALLOW, other=EPERM)), ALLOW),
        ),
    ),
    *(
        (
            Rule(name=name, verdict="EPERM for process 1 in gVisor", reason=_INIT_REASON),
            Load(LOW[0], Branch(JEQ, 1, EPERM, ALLOW)),
        )
        for name in ("tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
    ),
    (
        Rule(
            name="pidfd_send_signal",
            verdict="ENOSYS in gVisor",
            reason="its target is behind a descriptor; callers fall back to kill",
        ),
        ENOSYS,
    ),
    (
        Rule(
            name="fcntl in gVisor",
            verdict="EPERM also for F_SETSIG",
            reason="another signal than SIGIO could be sent to process 1",
        ),
        Load(LOW[1], _one_of((*_LEASES, _F_SETSIG), then=EPERM, other=ALLOW)),
    ),
)
_CONTENT_REASON: Final = "this kernel truncates files of a read-only tmpfs"
_ATTRIBUTE_CALLS: Final = (
    "setxattr", "lsetxattr", "fsetxattr", "setxattrat",
    "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
)  # fmt: skip
"""Used only where a read-only mount does not protect extended attributes (gVisor)."""

_MODE_ARGUMENT: Final = {
    "chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1, "mkdir": 1, "mkdirat": 2,
}  # fmt: skip
_FLAGS_ARGUMENT: Final = {"open": 1, "openat": 2}  # the mode is the argument after it
_NODE_ARGUMENT: Final = {"mknod": 1, "mknodat": 2}


def _decisions(
    *,
    allow_setid_modes: bool,
    only_counted_memory: bool,
    only_counted_messages: bool,
    guard_init: bool,
    guard_contents: bool,
) -> dict[str, Node]:
    made: dict[str, Node] = {
        name: _VERDICTS[answer] for answer, _, names in _REFUSED for name in names.split()
    }
    made |= {rule.name: node for rule, node in _BY_ARGUMENT}
    if only_counted_memory:
        made |= {rule.name: node for rule, node in _UNCOUNTED}
    if only_counted_messages:
        made |= {rule.name.partition(" ")[0]: node for rule, node in _COUNTED_MESSAGES}
    for name, argument in _NODE_ARGUMENT.items():
        made[name] = _mknod(argument, allow_setid_modes=allow_setid_modes)
    if not allow_setid_modes:
        made |= {name: _mode(argument) for name, argument in _MODE_ARGUMENT.items()}
        made |= {name: _open(argument) for name, argument in _FLAGS_ARGUMENT.items()}
        made["openat2"] = ENOSYS
    if guard_init:
        made |= {rule.name.partition(" ")[0]: node for rule, node in _GUARDED_INIT}
    if guard_contents:
        made |= {"truncate": EPERM, "openat2": ENOSYS}
        made |= dict.fromkeys(_ATTRIBUTE_CALLS, ENOSYS)
        for name, argument in _FLAGS_ARGUMENT.items():
            made[name] = _truncating(argument, made.get(name, ALLOW))
    return made


def _truncating(argument: int, allowed: Node) -> Node:
    """Refuse O_TRUNC without write access, which a read-only mount does not refuse."""
    reading = Load(LOW[argument], Branch(JEQ, 0, EPERM, allowed), mask=_O_ACCMODE)
    return _any_bit(argument, _O_TRUNC, then=reading, other=allowed)


def _search(runs: list[tuple[int, Node]]) -> Node:
    """Binary search by number over runs of equal decision, each given by its first number."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    return Branch(JGE, runs[middle][0], _search(runs[middle:]), _search(runs[:middle]))


def filter_program(
    *,
    machine: str,
    allow_setid_modes: bool = False,
    only_counted_memory: bool = False,
    only_counted_messages: bool = False,
    guard_init: bool = False,
    guard_contents: bool = False,
) -> bytes:
    """Compile the filter for ``machine`` to a packed array of ``struct sock_filter``.

    ``allow_setid_modes`` lifts the rules that keep set-user-id and set-group-id files from being
    made, and nothing else. ``only_counted_memory`` refuses memory that belongs to no process and
    no mount, for sandboxes whose memory limit is enforced by a watch. ``only_counted_messages``
    refuses local datagram sockets, for sandboxes with the id of their caller. ``guard_init`` and
    ``guard_contents`` are for a kernel that does not protect process 1, or the contents of
    read-only files on a tmpfs, by itself.
    """
    if machine not in MACHINES:
        msg = f"machine={machine!r} has no seccomp filter; accepted: {', '.join(MACHINES)}"
        hint = "run on a 64-bit x86 or Arm Linux, or choose a backend that needs no filter"
        raise SandboxUsageError(msg, argument="machine", hint=hint)
    decisions = _decisions(
        allow_setid_modes=allow_setid_modes,
        only_counted_memory=only_counted_memory,
        only_counted_messages=only_counted_messages,
        guard_init=guard_init,
        guard_contents=guard_contents,
    )
    return compile_decisions(decisions, numbers(machine=machine), machine=machine)


def compile_decisions(
    decisions: Mapping[str, Node], table: Mapping[str, int], *, machine: str
) -> bytes:
    """Compile decisions by name; a call that has none is allowed if its number is known."""
    by_number = {number: decisions[name] for name, number in table.items() if name in decisions}
    runs: list[tuple[int, Node]] = []
    for number in range(NEWEST + 1):
        decision = by_number.get(number, ALLOW)
        if not runs or runs[-1][1] != decision:
            runs.append((number, decision))
    runs.append((NEWEST + 1, ENOSYS))
    if machine == "x86_64":
        runs.append((X32_BIT, EPERM))
    by_call = Load(NR, _search(runs))
    return assemble(Load(ARCH, Branch(JEQ, AUDIT_ARCH[machine], by_call, EPERM)))


@functools.lru_cache(maxsize=8)
def digest(program: bytes) -> str:
    """Return the SHA-256 of a compiled filter in hex, as isolation reports contain it."""
    return hashlib.sha256(program).hexdigest()


def explain() -> tuple[Rule, ...]:
    """Return the whole policy as rules: first those for every call, then call by call."""
    general = (
        Rule(
            name="any call of another architecture",
            verdict="EPERM",
            reason="32-bit entry has other numbers and hides socket arguments in memory",
        ),
        Rule(name="any x32 call", verdict="EPERM", reason="the same calls under other numbers"),
        Rule(
            name=f"any number above {NEWEST}",
            verdict="ENOSYS",
            reason="newer than this policy; programs must cope with older kernels anyway",
        ),
    )
    refused = tuple(
        Rule(name=name, verdict=answer, reason=reason)
        for answer, reason, names in _REFUSED
        for name in names.split()
    )
    modes = tuple(
        Rule(name=name, verdict="EPERM with a set-id mode", reason=_SET_ID_REASON)
        for name in (*_MODE_ARGUMENT, *_FLAGS_ARGUMENT)
    )
    nodes = tuple(
        Rule(
            name=name,
            verdict="EPERM for device nodes and with a set-id mode",
            reason=f"{_NODE_REASON}; {_SET_ID_REASON}",
        )
        for name in _NODE_ARGUMENT
    )
    hidden = Rule(
        name="openat2",
        verdict="ENOSYS unless set-id modes are allowed",
        reason="its mode is behind a pointer; callers fall back to openat",
    )
    judged = (rule for rule, _ in (*_BY_ARGUMENT, *_COUNTED_MESSAGES, *_UNCOUNTED, *_GUARDED_INIT))
    contents = (
        Rule(name="truncate", verdict="EPERM in gVisor", reason=_CONTENT_REASON),
        *(
            Rule(
                name=name,
                verdict="ENOSYS in gVisor",
                reason="this kernel sets extended attributes on read-only mounts",
            )
            for name in _ATTRIBUTE_CALLS
        ),
        *(
            Rule(
                name=f"{name} in gVisor",
                verdict="EPERM for O_TRUNC without write access",
                reason=_CONTENT_REASON,
            )
            for name in _FLAGS_ARGUMENT
        ),
    )
    return (*general, *refused, *judged, *modes, *nodes, *contents, hidden)

"""Rows of the attack catalogue for ``landlock``: which apply, and the attacks that try them.

Every row is in exactly one group. `scripts/threats.py` writes the groups to the catalogue's page.
"""

from __future__ import annotations

from tests.escape.catalogue import ROWS, SERVER

ENDS = "what is left behind"
"""Not a name of ``inside.py``: the driver looks at what outlives its run."""
DESCRIPTORS = "descriptor "
"""How the name of an inherited descriptor begins; none may be open."""
_DATAGRAMS = ("unix datagram", "unix datagram of a raw socket")

ATTACKED: dict[int, tuple[str, ...]] = {
    1: (DESCRIPTORS,),
    2: ("chdir and read", "open below a handle"),
    3: ("open a handle again", "chmod by a link of /proc", "chmod of a handle by /proc"),
    10: ("hard link of a file",),
    18: ("set-uid file", "set-gid file by descriptor", "set-uid file at its creation"),
    19: (
        *("chmod", "chmod through a link", "chmod below a handle", "fchmodat2 of a handle"),
        *("chmod by ..", "chown", "utime", "utime through a link", "set an attribute"),
        *("race on a link", "race on a link, times"),
    ),
    20: ("truncate a file",),
    21: ("watch a directory",),
    22: ("file in /tmp", "file in /dev/shm"),
    23: ("private file of /etc",),
    24: ("list of devices",),
    25: ("device node",),
    28: (
        *("chmod of a readable file", "utime of a readable file", "flags of a readable file"),
        "fs-verity of a readable file",
    ),
    29: ("write to the library",),
    31: ("list of processes",),
    32: (
        *("signal", "signal 0", "signal by descriptor", "signal to the parent"),
        *("signal to the session's process", "signal to the group of a process"),
        *("queued signal", "signal by a descriptor's owner", "signal to everything"),
    ),
    33: ("memory of a process", "memory of the parent", "process_vm_readv", "ptrace"),
    34: ("descriptors of a process", "copy of a descriptor"),
    35: ("environment of a process", "command line of a process"),
    36: (
        *("limits of a process", "set limits of a process", "processors of a process"),
        *("priority of a process", "priority of a user", "input priority of a user"),
    ),
    37: (
        *("another session's work dir", "another session's scripts"),
        "unix socket of another run",
    ),
    38: ("shared memory", "message queue", "file in /dev/shm"),
    39: ("input to a terminal",),
    40: ("write to a terminal",),
    41: ("caller's environment",),
    54: ("user namespace",),
    56: ("mount", "open_tree"),
    59: ("io_uring",),
    61: ("vsock",),
    62: ("raw", "packet"),
    63: ("netlink",),
    76: ("tcp fast open", "tcp fast open by sendmsg", "udp"),
    77: ("tcp to loopback", "tcp to 0.0.0.0", "listen without bind", "bind and listen"),
    78: ("abstract socket",),
    79: ("unix socket", "unix socket through a link", "unix socket by ..", *_DATAGRAMS),
    89: ("tcp to a mapped address",),
    92: ("race on an address",),
    101: (ENDS,),
    107: (ENDS,),
    108: (ENDS,),
    111: ("signal to the parent",),
    136: ("lease on a readable file",),
    140: ("memory score of a process",),
    187: ("checkpoint of the session", "read a checkpoint", "change a checkpoint"),
}
"""Tried by ``inside.py`` from a session in a container with the default profile."""

NOT_KEPT = {
    103: "`TMPDIR` is a directory of the host without a limit",
    110: "prevented, unless caller, launcher and runner are killed at the same moment",
    142: "counters of the caller's id are shared; exact for root, with an id for each session",
    150: "the processes of an id are counted together; exact for root",
}
NO_SUCH_PART = {
    27: "nothing is mounted",
    98: "no network namespace is reused",
    130: "a read-only path in a writable one is refused",
    131: "a read-only path in a writable one is refused",
    132: "a read-only path in a writable one is refused",
    143: "an id for each session, or the caller's",
    164: "no network namespace is reused",
    **dict.fromkeys(range(176, 181), '`persist="machine"` is refused'),
    188: "checkpoints are copies, not layers",
}
_SAME_FILTER = (26, *range(55, 76), 138, 139)
_OWN = {*ATTACKED, *NOT_KEPT, *NO_SUCH_PART}
SAME_FILTER = tuple(row for row in _SAME_FILTER if row not in _OWN)
"""Decided by the system-call filter that every sandbox has, and its second one only adds to."""
_NAMED = (
    *range(4, 10),
    *range(11, 18),
    30,
    *range(42, 54),
    *range(80, 89),
    90,
    91,
    *range(93, 98),
    99,
    100,
    102,
    *range(104, 107),
    109,
    *range(112, 115),
    129,
    *range(133, 136),
    137,
    141,
    *range(144, 150),
    *range(161, 164),
    *range(172, 175),
    *range(181, 187),
    189,
)
_SERVER = (row for row, one in ROWS.items() if one.kind == SERVER and row not in _OWN)
SAME_CODE = (*_NAMED, *_SERVER)
"""Code and limits of the host or of the server, which do not depend on the backend."""


def held(row: int, outcomes: dict[str, str], ends: dict[str, object] | None) -> bool:
    """Return whether every attack of a row was held.

    Args:
        row: a row of `ATTACKED`.
        outcomes: the outcome of each attack, by its name.
        ends: the driver's look at what outlived its run, if it was done.

    """
    for name in ATTACKED[row]:
        if name == ENDS:
            if ends != {"quiet": True, "bomb": "timeout", "left": 0}:
                return False
        elif name == DESCRIPTORS:
            if any(key.startswith(DESCRIPTORS) for key in outcomes):
                return False
        elif outcomes.get(name) != "held":
            return False
    return True


def section() -> str:
    """Return the part of the catalogue's page about this backend."""
    names = {name for names in ATTACKED.values() for name in names}
    attacked, not_kept, no_part = len(ATTACKED), len(NOT_KEPT), len(NO_SUCH_PART)
    lines = [
        "## The landlock backend",
        "",
        f"Of the {len(ROWS)} rows, {attacked} are attacked from `landlock` sessions, by",
        f"{len(names)} attacks of [confined](../../tests/confined/test_attacks.py), as an",
        "ordinary user and as root, in containers with the engines' default profile. All are",
        f"held. {len(SAME_FILTER)} are decided by the system-call filter that every sandbox has,",
        f"{len(SAME_CODE)} by code and limits that are the same for every backend; their tests are",
        f"above. {not_kept} are not kept, or in part, and {no_part} concern a part that it does",
        "not have. One attack outside the catalogue succeeds: `stat`, so names, sizes and times",
        "of files outside can be learned.",
        "",
        "| | attacked from a session |",
        "|---|---|",
        *(f"| {row} | {'; '.join(names).strip()} |" for row, names in ATTACKED.items()),
        "",
        "| | not kept | ",
        "|---|---|",
        *(f"| {row} | {ROWS[row].title}: {why} |" for row, why in NOT_KEPT.items()),
        "",
        "| | no such part |",
        "|---|---|",
        *(f"| {row} | {ROWS[row].title}: {why} |" for row, why in NO_SUCH_PART.items()),
        "",
        f"The same filter: {_numbers(SAME_FILTER)}. The same code: {_numbers(SAME_CODE)}.",
        "",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _numbers(rows: tuple[int, ...]) -> str:
    return ", ".join(map(str, rows))

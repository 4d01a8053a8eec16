"""The names of the steps of a plan, in error messages."""

from __future__ import annotations

__all__ = ["OP_NAMES"]

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
    12: "network listener",
    13: "script file",
    14: "dropping privileges",
    15: "Landlock rule set",
    16: "Landlock rule",
    17: "Landlock",
    18: "system-call filter",
    19: "limit",
    20: "reaper",
    21: "leaving the caller's root",
    22: "identity check",
    23: "mount flags",
    24: "limit of a tmpfs",
    25: "bwrap",
    26: "entering the private root",
    27: "covered file",
    28: "limit of a user namespace",
    30: "shared view",
    31: "network redirection",
    32: "layers of the work dir",
    33: "attaching the work dir",
    34: "copy of a mount",
    40: "opening a terminal",
    41: "confinement",
    42: "dropping capabilities",
    43: "priority",
    44: "system-call notification",
    48: "template",
}
"""The name of each step in error messages."""

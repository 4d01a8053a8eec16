"""System call numbers that the seccomp filter names, per architecture.

Only calls that the filter decides about are listed; every other number up to ``NEWEST`` is allowed,
so a missing row is part of the policy. From 424 on, both architectures use the same numbers.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AUDIT_ARCH", "MACHINES", "NEWEST", "X32_BIT", "numbers"]

MACHINES: Final = ("x86_64", "aarch64")

AUDIT_ARCH: Final[Mapping[str, int]] = MappingProxyType(
    {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
)
"""The value of ``seccomp_data.arch`` for a native 64-bit call."""

NEWEST: Final = 469
"""``file_setattr``, the last call of Linux 6.18 on both architectures; later calls are refused."""

X32_BIT: Final = 0x4000_0000
"""Set by the kernel in the number of a call that came through the x32 ABI of x86_64."""

# name: (x86_64, aarch64); None where the architecture never had the call.
_TABLE: Final[Mapping[str, tuple[int | None, int | None]]] = MappingProxyType(
    {
        "open": (2, None),
        "ioctl": (16, 29),
        "shmget": (29, 194),
        "socket": (41, 198),
        "socketpair": (53, 199),
        "clone": (56, 220),
        "kill": (62, 129),
        "fcntl": (72, 25),
        "truncate": (76, 45),
        "mkdir": (83, None),
        "creat": (85, None),
        "chmod": (90, None),
        "fchmod": (91, 52),
        "ptrace": (101, 117),
        "syslog": (103, 116),
        "rt_sigqueueinfo": (129, 138),
        "mknod": (133, None),
        "uselib": (134, None),
        "personality": (135, 92),
        "ustat": (136, None),
        "sysfs": (139, None),
        "vhangup": (153, 58),
        "modify_ldt": (154, None),
        "pivot_root": (155, 41),
        "_sysctl": (156, None),
        "adjtimex": (159, 171),
        "setrlimit": (160, 164),
        "chroot": (161, 51),
        "acct": (163, 89),
        "settimeofday": (164, 170),
        "mount": (165, 40),
        "umount2": (166, 39),
        "swapon": (167, 224),
        "swapoff": (168, 225),
        "reboot": (169, 142),
        "sethostname": (170, 161),
        "setdomainname": (171, 162),
        "iopl": (172, None),
        "ioperm": (173, None),
        "create_module": (174, None),
        "init_module": (175, 105),
        "delete_module": (176, 106),
        "get_kernel_syms": (177, None),
        "query_module": (178, None),
        "quotactl": (179, 60),
        "nfsservctl": (180, 42),
        "setxattr": (188, 5),
        "lsetxattr": (189, 6),
        "fsetxattr": (190, 7),
        "removexattr": (197, 14),
        "lremovexattr": (198, 15),
        "fremovexattr": (199, 16),
        "tkill": (200, 130),
        "io_setup": (206, 0),
        "io_destroy": (207, 1),
        "io_getevents": (208, 4),
        "io_submit": (209, 2),
        "io_cancel": (210, 3),
        "lookup_dcookie": (212, 18),
        "clock_settime": (227, 112),
        "tgkill": (234, 131),
        "kexec_load": (246, 104),
        "add_key": (248, 217),
        "request_key": (249, 218),
        "keyctl": (250, 219),
        "migrate_pages": (256, 238),
        "openat": (257, 56),
        "mkdirat": (258, 34),
        "mknodat": (259, 33),
        "fchmodat": (268, 53),
        "unshare": (272, 97),
        "move_pages": (279, 239),
        "rt_tgsigqueueinfo": (297, 240),
        "perf_event_open": (298, 241),
        "fanotify_init": (300, 262),
        "fanotify_mark": (301, 263),
        "prlimit64": (302, 261),
        "name_to_handle_at": (303, 264),
        "open_by_handle_at": (304, 265),
        "clock_adjtime": (305, 266),
        "setns": (308, 268),
        "process_vm_readv": (310, 270),
        "process_vm_writev": (311, 271),
        "kcmp": (312, 272),
        "finit_module": (313, 273),
        "memfd_create": (319, 279),
        "kexec_file_load": (320, 294),
        "bpf": (321, 280),
        "userfaultfd": (323, 282),
        "io_pgetevents": (333, 292),
        "pidfd_send_signal": (424, 424),
        "io_uring_setup": (425, 425),
        "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427),
        "open_tree": (428, 428),
        "move_mount": (429, 429),
        "fsopen": (430, 430),
        "fsconfig": (431, 431),
        "fsmount": (432, 432),
        "fspick": (433, 433),
        "clone3": (435, 435),
        "openat2": (437, 437),
        "pidfd_getfd": (438, 438),
        "process_madvise": (440, 440),
        "mount_setattr": (442, 442),
        "quotactl_fd": (443, 443),
        "memfd_secret": (447, 447),
        "process_mrelease": (448, 448),
        "cachestat": (451, 451),
        "fchmodat2": (452, 452),
        "statmount": (457, 457),
        "listmount": (458, 458),
        "lsm_set_self_attr": (460, 460),
        "setxattrat": (463, 463),
        "removexattrat": (466, 466),
        "open_tree_attr": (467, 467),
    }
)


def numbers(*, machine: str) -> dict[str, int]:
    """Return the calls that ``machine`` has, as name -> number."""
    column = MACHINES.index(machine)
    found = {name: row[column] for name, row in _TABLE.items()}
    return {name: number for name, number in found.items() if number is not None}

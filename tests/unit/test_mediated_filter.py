"""The second filter of sandboxes without namespaces: verdicts by network, id and Landlock ABI."""

from __future__ import annotations

import pytest
from tests.unit.bpf_machine import execute, seccomp_data, unpack
from tests.unit.test_syscalls import from_headers

from union.sandbox._seccomp.mediated import _TABLE, mediated_numbers, mediated_program
from union.sandbox._seccomp.syscalls import AUDIT_ARCH, MACHINES, NEWEST

ALLOW, NOTIFY, ERRNO = 0x7FFF_0000, 0x7FC0_0000, 0x0005_0000
EPERM, EACCES, ENOTTY, ENOSYS, EPROTO, EOPNOTSUPP = (
    ERRNO | code for code in (1, 13, 25, 38, 93, 95)
)
UNIX, INET, INET6, NETLINK = 1, 2, 10, 16
STREAM, DGRAM, SEQPACKET = 1, 2, 5
FASTOPEN = 0x2000_0000
IGNORED = 1 << 40
"""A bit that the kernel ignores where it reads an int."""


class Filter:
    def __init__(
        self, machine: str, network: str = "blocked", *, shares_id: bool = True, abi: int = 7
    ) -> None:
        program = mediated_program(machine=machine, network=network, shares_id=shares_id, abi=abi)
        self.code = unpack(program)
        self.table = mediated_numbers(machine=machine)
        self.arch = AUDIT_ARCH[machine]

    def __call__(self, name: str, *args: int) -> int:
        data = seccomp_data(self.table[name], arch=self.arch, args=args)
        return execute(self.code, data)[0]


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_agree_with_the_kernel_headers(machine: str) -> None:
    header = from_headers(machine)
    ours = mediated_numbers(machine=machine)
    assert {name: ours[name] for name in ours if name in header} == {
        name: header[name] for name in ours if name in header
    }
    assert not {name for name in _TABLE if name not in ours} & set(header)
    assert len(set(ours.values())) == len(ours)
    assert max(ours.values()) <= NEWEST


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets_by_network(machine: str) -> None:
    for network, tcp in (("blocked", EACCES), ("filtered", ALLOW), ("open", ALLOW)):
        judge = Filter(machine, network)
        for family in (INET, INET6):
            assert judge("socket", family, STREAM, 0) == tcp
            assert judge("socket", family | IGNORED, STREAM | 0o4000, 6) == tcp
            assert judge("socket", family, DGRAM, 0) == (ALLOW if network == "open" else EACCES)
        assert judge("socket", UNIX, STREAM, 0) == (EACCES if network == "open" else ALLOW)
        assert judge("socketpair", UNIX, STREAM, 0) == ALLOW
        assert judge("socketpair", UNIX, DGRAM | 0o4000, 0) == EPROTO
        assert judge("connect", 3, 4, 16) == (ALLOW if network == "open" else NOTIFY)
        assert judge("listen", 3, 5) == (EACCES if network == "filtered" else ALLOW)
        if network != "open":
            assert judge("socket", UNIX, DGRAM, 0) == EPROTO
            assert judge("socket", NETLINK, 3, 0) == EACCES
            assert judge("sendto", 3, 0, 1, 0, 0, 0) == ALLOW
            assert judge("sendto", 3, 0, 1, 0, 0x1000, 16) == EACCES
            assert judge("sendto", 3, 0, 1, 0, 1 << 40, 16) == EACCES
            assert judge("sendto", 3, 0, 1, FASTOPEN, 0, 0) == EACCES
            assert judge("sendmsg", 3, 0, FASTOPEN | IGNORED) == EACCES
            assert judge("sendmmsg", 3, 0, 1, FASTOPEN) == EACCES
            assert judge("sendmsg", 3, 0, 0) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_other_processes_are_out_of_reach(machine: str) -> None:
    judge = Filter(machine)
    for name in ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setattr"):
        assert judge(name, 0) == ALLOW
        assert judge(name, IGNORED) == ALLOW
        assert judge(name, 1) == EPERM
        assert judge(name, 0xFFFF_FFFF) == EPERM
    assert judge("setpriority", 0, 0, 5) == ALLOW
    assert judge("setpriority", 0, 7, 5) == EPERM
    assert judge("setpriority", 2, 0, 5) == EPERM
    assert judge("ioprio_set", 1, 0, 0) == ALLOW
    assert judge("ioprio_set", 3, 0, 0) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_signals_are_notified_before_abi_6(machine: str) -> None:
    old, new = Filter(machine, abi=5), Filter(machine, abi=6)
    for name in ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "pidfd_send_signal"):
        assert old(name, 1, 9) == NOTIFY
        assert new(name, 1, 9) == ALLOW
    for command in (8, 15):
        assert old("fcntl", 3, command, 1) == EPERM
        assert new("fcntl", 3, command, 1) == ALLOW
    assert old("fcntl", 3, 4, 0) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_metadata_is_notified_where_others_have_the_same_id(machine: str) -> None:
    shared, own = Filter(machine), Filter(machine, shares_id=False)
    for name in ("fchmod", "fchmodat", "fchmodat2", "utimensat"):
        assert shared(name, 3, 4, 5) == NOTIFY
        assert own(name, 3, 4, 5) == ALLOW
    for name in ("setxattr", "fsetxattr", "setxattrat", "removexattr"):
        assert shared(name) == EOPNOTSUPP
        assert own(name) == ALLOW
    for judge in (shared, own):
        assert judge("fchownat") == judge("fchown") == EPERM
        assert judge("file_setattr") == ENOSYS
        assert judge("inotify_add_watch") == EACCES
        assert judge("shmget") == judge("mq_open") == judge("semget") == judge("msgget") == ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_ioctl_has_an_allow_list(machine: str) -> None:
    judge = Filter(machine)
    for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5451, 0x5401 | IGNORED):
        assert judge("ioctl", 3, request) == ALLOW
    # TIOCSTI, FS_IOC_SETFLAGS, FS_IOC_ENABLE_VERITY, FS_IOC_FSSETXATTR, FIOSETOWN, TIOCSETD.
    for request in (0x5412, 0x40086602, 0x40806685, 0x401C5820, 0x8901, 0x5423, 0):
        assert judge("ioctl", 3, request) == ENOTTY


def test_another_architecture_and_newer_calls_are_refused() -> None:
    judge = Filter("x86_64")
    assert execute(judge.code, seccomp_data(1, arch=0x4000_0003))[0] == EPERM
    assert execute(judge.code, seccomp_data(NEWEST + 1, arch=judge.arch))[0] == ENOSYS
    assert execute(judge.code, seccomp_data(0x4000_0001, arch=judge.arch))[0] == EPERM

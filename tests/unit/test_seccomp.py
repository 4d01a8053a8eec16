"""The filter checked three ways: by an independent oracle, a BPF interpreter and this kernel."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.bpf_machine import (
    ALLOW,
    EINVAL,
    ENOSYS,
    EPERM,
    EPROTONOSUPPORT,
    SUCCESS,
    execute,
    seccomp_data,
    unpack,
    verdict,
)

from union.sandbox._seccomp.filter import digest, explain, filter_program
from union.sandbox._seccomp.syscalls import AUDIT_ARCH, MACHINES, NEWEST, numbers
from union.sandbox.errors import SandboxUsageError

NUMBERS = {machine: numbers(machine=machine) for machine in MACHINES}
NAMES = {m: {number: name for name, number in table.items()} for m, table in NUMBERS.items()}
CODE = {
    (machine, lifted): unpack(filter_program(machine=machine, allow_setid_modes=lifted))
    for machine in MACHINES
    for lifted in (False, True)
}

ALWAYS_EPERM_TEXT = """
    mount umount2 pivot_root chroot open_tree move_mount fsopen fsconfig fsmount fspick
    mount_setattr open_tree_attr setns ptrace process_vm_readv process_vm_writev pidfd_getfd kcmp
    process_madvise process_mrelease bpf perf_event_open userfaultfd io_uring_setup io_uring_enter
    io_uring_register keyctl add_key request_key init_module finit_module delete_module
    create_module kexec_load kexec_file_load reboot swapon swapoff settimeofday clock_settime
    clock_adjtime adjtimex iopl ioperm modify_ldt acct quotactl quotactl_fd nfsservctl
    open_by_handle_at name_to_handle_at fanotify_init fanotify_mark lookup_dcookie syslog vhangup
    sethostname setdomainname _sysctl uselib ustat sysfs move_pages migrate_pages get_kernel_syms
    query_module lsm_set_self_attr memfd_secret cachestat
"""
ALWAYS_EPERM = set(ALWAYS_EPERM_TEXT.split())
ALWAYS_ENOSYS = {"clone3", "statmount", "listmount"}
ALWAYS_ENOSYS |= {"io_setup", "io_destroy", "io_submit", "io_cancel", "io_getevents"}
ALWAYS_ENOSYS |= {"io_pgetevents"}
MODE_AT = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "creat": 1}
MODE_AT |= {"mkdir": 1, "mkdirat": 2, "mknod": 1, "mknodat": 2}
OPEN_AT = {"open": 1, "openat": 2}
OTHER_INTS = ("clone", "fcntl", "ioctl", "setrlimit", "socket", "socketpair")
# (family, type without flags, protocol) of the internet sockets that may be opened.
SOCKETS = {(2, 1, 0), (2, 1, 6), (2, 2, 0), (2, 2, 17), (2, 2, 1), (2, 2, 58)}
SOCKETS |= {(10, kind, protocol) for _, kind, protocol in SOCKETS}


def may_open_socket(family, kind, protocol):
    kind &= 15
    if family == 1:
        return kind not in {3, 10}
    if family == 16:
        return protocol == 0
    return (family, kind, protocol) in SOCKETS


def makes_set_id(name, low):
    if name in OPEN_AT:
        at = OPEN_AT[name]
        return bool(low[at] & (0o100 | 0o20000000)) and bool(low[at + 1] & 0o6000)
    return name in MODE_AT and bool(low[MODE_AT[name]] & 0o6000)


def refuses_argument(name, args, low):
    match name:
        case "clone":
            return bool(low[0] & 0x7E020000)
        case "unshare":
            return bool(args[0] & ~0x50F00)
        case "personality":
            return low[0] not in {0, 0xFFFFFFFF}
        case "ioctl":
            return low[1] in {0x5412, 0x541C, 0x541D, 0x5423} or low[1] >> 8 in {0x4B, 0x56}
        case "fcntl":
            return low[1] in {1024, 1026, 1040}
        case "prlimit64":
            return low[1] == 4 and args[2] != 0 and args[3] != 0
        case "socket":
            return not may_open_socket(*low[:3])
        case "socketpair":
            return low[0] != 1 or low[1] & 15 in {3, 10}
        case "mknod" | "mknodat":
            return low[MODE_AT[name]] & 0o170000 in {0o020000, 0o060000}
    return False


def expected(machine, nr, args, *, lifted):
    if machine == "x86_64" and nr & 0xC0000000:
        return EPERM
    if nr > NEWEST:
        return ENOSYS
    name = NAMES[machine].get(nr)
    low = tuple(arg & 0xFFFFFFFF for arg in args)
    if name in ALWAYS_ENOSYS or (name == "openat2" and not lifted):
        return ENOSYS
    if (name == "setrlimit" and low[0] == 4) or (
        name == "prlimit64" and low[1] == 4 and args[2] != 0 and args[3] == 0
    ):
        return SUCCESS
    set_id = not lifted and makes_set_id(name, low)
    return EPERM if name in ALWAYS_EPERM or set_id or refuses_argument(name, args, low) else ALLOW


INTERESTING = (
    0, 1, 2, 3, 5, 6, 10, 16, 17, 38, 40, 58, 136, 262, 0x11, 0x40, 0x80, 0x100, 0x200, 0x400,
    0x20000, 0x40000, 0x800, 0x10000, 0x100000, 0x400000, 0x410000, 0x2000000, 0x4000000,
    0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80000, 0x80001, 0x80002, 0x80003, 0x80801,
    0x541D, 4, 1024, 1026, 1040, 0x4B3A, 0x5606, 0x80045600,
    0x5412, 0x541C, 0x5423, 0x5413, 0xFFFFFFFF, 0o644, 0o755, 0o1777, 0o2755, 0o4755, 0o6755,
    0o10644, 0o20644, 0o60644, 0o100644, 0o140644, 0o104755, 0o102, 0x3D0F00, 0x1200011,
)  # fmt: skip
LOW_WORDS = st.sampled_from(INTERESTING) | st.integers(0, 2**32 - 1)
HIGH_WORDS = st.just(0) | st.sampled_from((1, 0x80000000, 0xFFFFFFFF)) | st.integers(0, 2**32 - 1)
ARGUMENT = st.builds(lambda low, high: high << 32 | low, LOW_WORDS, HIGH_WORDS)
ARGUMENTS = st.tuples(*[ARGUMENT] * 6)
WHICH = st.tuples(st.sampled_from(MACHINES), st.booleans())


def judge(machine, nr, args, *, lifted):
    data = seccomp_data(nr, arch=AUDIT_ARCH[machine], args=args)
    return verdict(CODE[machine, lifted], data)


@pytest.mark.slow
@pytest.mark.parametrize("lifted", [False, True])
@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_with_every_interesting_word(machine, lifted):
    vectors = [(word,) * 6 for word in INTERESTING]
    vectors += [(0xDEAD00000000 | word,) * 6 for word in INTERESTING]
    for nr in range(NEWEST + 100):
        for args in vectors:
            wanted = expected(machine, nr, args, lifted=lifted)
            assert judge(machine, nr, args, lifted=lifted) == wanted, (nr, args)


@pytest.mark.slow
@settings(max_examples=400)
@given(which=WHICH, data=st.data(), args=ARGUMENTS)
def test_judged_calls_agree_with_the_oracle_on_any_arguments(which, data, args):
    machine, lifted = which
    judged = sorted(set(NUMBERS[machine]) - ALWAYS_EPERM - ALWAYS_ENOSYS)
    nr = NUMBERS[machine][data.draw(st.sampled_from(judged))]
    assert judge(machine, nr, args, lifted=lifted) == expected(machine, nr, args, lifted=lifted)


@pytest.mark.slow
@settings(max_examples=300)
@given(which=WHICH, nr=st.integers(0, 2**32 - 1) | st.integers(0, 600), args=ARGUMENTS)
def test_any_number_at_all_agrees_with_the_oracle(which, nr, args):
    machine, lifted = which
    assert judge(machine, nr, args, lifted=lifted) == expected(machine, nr, args, lifted=lifted)


@given(
    family=st.integers(0, 50),
    kind=st.integers(0, 15),
    flags=st.sampled_from((0, 0x80000, 0x80800, 0x10, 0xF0, 0x7FFFFFF0)),
    protocol=st.integers(0, 300),
)
def test_socket_space_agrees_with_the_oracle(family, kind, flags, protocol):
    for machine in MACHINES:
        nr = NUMBERS[machine]["socket"]
        wanted = ALLOW if may_open_socket(family, kind, protocol) else EPERM
        assert judge(machine, nr, (family, kind | flags, protocol, 0, 0, 0), lifted=False) == wanted


@pytest.mark.parametrize("high", [0, 0xDEAD << 32])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_core_limit_is_read_but_not_set(machine, high):
    """Whatever the upper half of the resource is; a pointer counts with both halves."""
    nr = NUMBERS[machine]
    for pointer in (1, 1 << 32, 0x7F0012345678):
        assert judge(machine, nr["prlimit64"], (0, high | 4, 0, pointer), lifted=False) == ALLOW
        assert judge(machine, nr["prlimit64"], (0, high | 4, pointer, 0), lifted=False) == SUCCESS
        assert (
            judge(machine, nr["prlimit64"], (0, high | 4, pointer, pointer), lifted=False) == EPERM
        )
        assert judge(machine, nr["prlimit64"], (0, high | 7, pointer, 0), lifted=False) == ALLOW
    assert judge(machine, nr["setrlimit"], (high | 4, 1), lifted=False) == SUCCESS
    assert judge(machine, nr["setrlimit"], (high | 7, 1), lifted=False) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_memory_without_a_process_is_refused_only_under_a_watch(machine):
    watched = unpack(filter_program(machine=machine, only_counted_memory=True))
    nr = NUMBERS[machine]

    def both(name, *args):
        data = seccomp_data(nr[name], arch=AUDIT_ARCH[machine], args=args)
        return verdict(CODE[machine, False], data), verdict(watched, data)

    assert both("memfd_create", 1, 0) == (ALLOW, ENOSYS)
    assert both("shmget", 0, 4096, 0o1600) == (ALLOW, ALLOW)
    for size in (4097, 1 << 31, 1 << 32, 1 << 32 | 1, 2**64 - 1):
        assert both("shmget", 0, size, 0o1600) == (ALLOW, EINVAL)
    assert both("fcntl", 3, 1024, 0) == (EPERM, EPERM), "the rest is the same"


@pytest.mark.parametrize("flags", [0, 0x80000, 0x80800, 0x10, 0xF0, 0x7FFFFFF0])
@pytest.mark.parametrize("family", [1, 2, 10])
@pytest.mark.parametrize("machine", MACHINES)
def test_flags_do_not_hide_a_raw_socket(machine, family, flags):
    for kind, name in itertools.product((3, 10), ("socket", "socketpair")):
        args = (family, kind | flags, 0, 0, 0, 0)
        assert judge(machine, NUMBERS[machine][name], args, lifted=False) == EPERM


@pytest.mark.parametrize("flags", [0, 0x80000, 0x80800, 0x10, 0x7FFFFFF0])
@pytest.mark.parametrize("machine", MACHINES)
def test_local_datagrams_are_refused_only_to_sandboxes_with_the_id_of_their_caller(machine, flags):
    shared = unpack(filter_program(machine=machine, only_counted_messages=True))

    def both(name, family, kind):
        args = (family, kind | flags, 0, 0, 0, 0)
        data = seccomp_data(NUMBERS[machine][name], arch=AUDIT_ARCH[machine], args=args)
        return verdict(CODE[machine, False], data), verdict(shared, data)

    for name in ("socket", "socketpair"):
        assert both(name, 1, 2) == (ALLOW, EPROTONOSUPPORT)
        assert both(name, 1, 1) == both(name, 1, 5) == (ALLOW, ALLOW), "a stream, packets"
        assert both(name, 1, 3) == (EPERM, EPERM), "the kernel makes a datagram socket of it"
    assert both("socket", 2, 2) == (ALLOW, ALLOW), "UDP"


@given(name=st.sampled_from(sorted({*MODE_AT, *OPEN_AT, *OTHER_INTS})),
       low=st.tuples(*[LOW_WORDS] * 6), high=st.tuples(*[HIGH_WORDS] * 6))  # fmt: skip
def test_bits_the_kernel_ignores_change_nothing(name, low, high):
    for machine in MACHINES:
        nr = NUMBERS[machine].get(name)
        if nr is None:
            continue
        dirty = tuple(h << 32 | word for h, word in zip(high, low, strict=True))
        assert judge(machine, nr, dirty, lifted=False) == judge(machine, nr, low, lifted=False)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("arch", [0x40000003, 0x40000028, 0xC0000016, 0, 0xFFFFFFFF, "other"])
def test_another_architecture_is_refused_for_every_number(machine, arch):
    if arch == "other":
        arch = AUDIT_ARCH[next(other for other in MACHINES if other != machine)]
    for nr in (*range(NEWEST + 50), 2**31, 2**32 - 1):
        assert verdict(CODE[machine, False], seccomp_data(nr, arch=arch)) == EPERM


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_without_a_rule_are_allowed_without_reading_arguments(machine):
    """Then the kernel caches the verdict, and read, write or futex never run the filter."""
    for nr in range(NEWEST + 1):
        data = seccomp_data(nr, arch=AUDIT_ARCH[machine])
        _, steps, looked = execute(CODE[machine, False], data)
        assert steps <= 20, nr
        if nr not in NAMES[machine]:
            assert not looked, nr
            assert verdict(CODE[machine, False], data) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_programs_stay_small(machine):
    assert len(CODE[machine, False]) < 256
    assert len(CODE[machine, True]) < len(CODE[machine, False])


def test_compilation_is_reproducible_and_variants_have_different_digests():
    programs = [
        filter_program(machine=machine, allow_setid_modes=lifted)
        for machine in MACHINES
        for lifted in (False, True)
    ]
    assert len({digest(program) for program in programs}) == 4
    assert digest(filter_program(machine="x86_64")) == digest(programs[0])
    assert len(digest(b"")) == 64


@pytest.mark.parametrize("machine", ["i686", "riscv64", "", "X86_64"])
def test_unknown_machine_is_a_usage_error_that_lists_accepted_values(machine):
    with pytest.raises(SandboxUsageError, match="x86_64, aarch64") as caught:
        filter_program(machine=machine)
    assert caught.value.argument == "machine"
    assert repr(machine) in str(caught.value)
    assert caught.value.hint


def test_explanation_covers_exactly_the_calls_in_the_tables():
    named = [rule.name for rule in explain()]
    assert len(named) == len(set(named))
    assert {name for name in named if " " not in name} == {n for t in NUMBERS.values() for n in t}
    verdicts = ("EPERM", "ENOSYS", "EINVAL", EPROTONOSUPPORT, "returns 0")
    assert all(rule.reason and rule.verdict.startswith(verdicts) for rule in explain())


def test_explanation_agrees_with_the_filter_on_flat_refusals():
    for rule in explain():
        if rule.verdict in {"EPERM", "ENOSYS"} and " " not in rule.name:
            for machine in MACHINES:
                if rule.name in NUMBERS[machine]:
                    nr = NUMBERS[machine][rule.name]
                    assert judge(machine, nr, (0,) * 6, lifted=True) == rule.verdict


# --- on this kernel ---------------------------------------------------------------------------

PROBE = os.path.join(os.path.dirname(__file__), "seccomp_probe.py")
on_linux = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in MACHINES,
    reason="needs a Linux kernel on x86_64 or aarch64 to install the filter in",
)
SET_ID = {"chmod 4755", "fchmod 2755", "create 4755", "tmpfile 4755", "mkdir 2755", "mknod 4755"}


def probe(*, program):
    asked = {"program": program.hex(), "numbers": NUMBERS[platform.machine()]}
    done = subprocess.run(
        [sys.executable, "-I", PROBE],
        input=json.dumps(asked).encode(),
        capture_output=True,
        check=False,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def filtered():
    return probe(program=filter_program(machine=platform.machine()))


@on_linux
def test_kernel_refuses_what_the_policy_refuses(filtered):
    refused = dict(filtered["refused"])
    assert refused.pop("int 0x80", "EPERM") in {"EPERM", "killed"}
    enosys = {"clone3", "openat2", "newer than the table"}
    if platform.machine() != "x86_64":
        enosys.add("x32 getpid")
    assert refused == {name: ENOSYS if name in enosys else EPERM for name in refused}
    assert len(refused) > 40


@on_linux
def test_everyday_programs_do_not_notice_the_filter(filtered):
    assert filtered["everyday"] == dict.fromkeys(filtered["everyday"], "ok")
    assert len(filtered["everyday"]) >= 15


@on_linux
def test_lifting_the_set_id_rule_lifts_nothing_else():
    program = filter_program(machine=platform.machine(), allow_setid_modes=True)
    refused = probe(program=program)["refused"]
    assert {name for name in refused if refused[name] == "ok"} == SET_ID
    assert refused["mknod null"] == EPERM
    assert refused["openat2"] == "EINVAL"  # the kernel itself refuses a size of 0


@on_linux
def test_without_the_filter_the_probe_succeeds():
    """Otherwise the refusals above would prove something about this machine, not the filter."""
    outcome = probe(program=b"")
    assert {name for name in SET_ID if outcome["refused"][name] == "ok"} == SET_ID
    assert outcome["refused"].get("int 0x80", "ok") in {"ok", "killed"}

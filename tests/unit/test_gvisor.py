"""The differences of a sandbox in gVisor, as far as they can be tested on any kernel."""

from __future__ import annotations

import dataclasses
import errno
import os
import struct
from typing import TYPE_CHECKING

import pytest
from tests.unit.bpf_machine import ALLOW, ENOSYS, EPERM, seccomp_data, unpack, verdict
from tests.unit.test_bwrap_args import ROOT, VIEW

from union.sandbox._backends.base import Identity, Setting
from union.sandbox._backends.userns import NEW, Userns
from union.sandbox._codecs.iptables import iptables_redirect
from union.sandbox._codecs.netlink import half_routes
from union.sandbox._core.spec import Limits
from union.sandbox._linux import host, kernel, memory
from union.sandbox._linux.protocol import FailurePlace
from union.sandbox._plan import plan as p
from union.sandbox._plan.adaptation import LINUX, KernelFeatures, adapted
from union.sandbox._plan.rootfs import HELD_DIR, Shown
from union.sandbox._seccomp.filter import filter_program
from union.sandbox._seccomp.syscalls import AUDIT_ARCH, MACHINES, numbers
from union.sandbox.errors import BackendUnavailableError, PolicyError
from union.sandbox.on_device import _probe
from union.sandbox.on_device._network import network_steps
from union.sandbox.on_device._posture import Posture
from union.sandbox.on_device._read_only import refuse_on_tmpfs
from union.sandbox.on_device._settings import limit_report

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.spec("G1", "B9")

GVISOR = KernelFeatures(
    cgroup_namespaces=False,
    mount_trees=False,
    securebits=False,
    terminal_options=False,
    init_is_immune=False,
    read_only_metadata=False,
    own_proc_net=False,
    own_process_count=False,
    nf_tables=False,
)
CALLER = Identity(
    uid=1000, gid=1000, host_uid=1000, host_gid=1000, kind="caller", deny_setgroups=True
)


def setting(**options: object) -> Setting:
    given = {
        "view": VIEW,
        "identity": CALLER,
        "network": "blocked",
        "network_steps": (),
        "egress": "kernel",
        "landlock_abi": 0,
        "seccomp": b"\x06\0\0\0\0\0\xff\x7f",
        "kernel": GVISOR,
    }
    return Setting(**{**given, **options})  # type: ignore[arg-type]


# Plans.


@pytest.mark.parametrize("share", [True, False])
def test_nothing_changes_on_linux(*, share: bool) -> None:
    linux = setting(kernel=LINUX, share=share)
    plan = Userns().plan(linux)
    assert plan.steps == adapted(plan.steps, LINUX)
    assert not any(isinstance(s, p.Bind) and s.classic for s in plan.steps)


@pytest.mark.parametrize("share", [True, False])
def test_every_bind_is_made_before_the_callers_root_is_detached(*, share: bool) -> None:
    """A descriptor can be bound only while its mount is attached."""
    plan = Userns().plan(setting(share=share))
    steps = list((plan.shared or plan).steps)
    binds = [at for at, step in enumerate(steps) if isinstance(step, p.Bind)]
    assert binds
    assert all(step.classic for step in steps if isinstance(step, p.Bind))
    assert max(binds) < steps.index(p.Detach()) < steps.index(p.Remount("/"))
    assert steps.count(p.Detach()) == steps.count(p.Remount("/")) == 1
    linux = Userns().plan(setting(share=share, kernel=LINUX))
    assert len(steps) == len((linux.shared or linux).steps), "no step is lost"


def test_missing_features_are_left_out_and_reported() -> None:
    plan = Userns().plan(setting())
    assert not plan.clone_flags & NEW["cgroup"]
    assert p.Lockdown(securebits=0) in plan.steps
    report = Userns().isolation(setting(), limits=())
    assert "cgroup" not in report.namespaces
    assert (report.securebits, report.proc_net, report.read_only) == (False, "shared", "contents")
    report = Userns().isolation(setting(kernel=LINUX), limits=())
    assert "cgroup" in report.namespaces
    assert (report.securebits, report.proc_net, report.read_only) == (True, "own", "full")


def test_an_id_that_owns_nothing_protects_read_only_paths() -> None:
    assert Userns().isolation(setting(identity=ROOT), limits=()).read_only == "full"
    assert Userns().isolation(setting(network="open"), limits=()).proc_net == "host"


def test_terminals_have_only_the_options_that_exist() -> None:
    view = dataclasses.replace(VIEW, terminals=True)
    steps = Userns().plan(setting(view=view)).steps
    assert [s.options for s in steps if isinstance(s, p.Devpts)] == ["newinstance,ptmxmode=0666"]


@pytest.mark.parametrize("share", [True, False])
def test_mounts_below_a_read_only_path_are_read_only_too(*, share: bool) -> None:
    """Also where the path is kept for sandboxes, below a directory of their own."""
    view = dataclasses.replace(
        VIEW,
        added=(*VIEW.added, Shown(source="/real/kept", path="/tmp/kept")),
        mount_points=("/", "/real/data/sub", "/real/data2", "/srv/work/sub", "/real/kept/sub"),
    )
    plan = Userns().plan(setting(view=view, share=share))
    steps = (*(plan.shared.steps if plan.shared else ()), *plan.steps)
    found = {s.path: s.flags for s in steps if isinstance(s, p.Remount)}
    read_only = p.RDONLY | p.NOSUID | p.NODEV
    assert found["/data/sub"] == found["/tmp/kept/sub"] == read_only
    assert found["/srv/work/sub"] == p.NOSUID | p.NODEV
    assert not any("data2" in path for path in found)
    if share:
        assert found[f"{HELD_DIR}/0/sub"] == read_only


def test_parts_of_proc_are_made_read_only_in_place() -> None:
    view = dataclasses.replace(VIEW, guarded_proc=("/proc/sys",))
    assert p.Bind("/proc/sys", "/proc/sys") in Userns().plan(setting(view=view, kernel=LINUX)).steps
    steps = Userns().plan(setting(view=view)).steps
    assert p.Cover("/proc/sys", "/proc/sys") in steps
    assert not any(isinstance(s, p.Bind) and s.path.startswith("/proc") for s in steps)


def test_a_count_of_all_sessions_is_reported_as_shared() -> None:
    def processes(who: Identity, *, own: bool) -> str:
        report = limit_report(Limits(), who, None, shared=True, counted=False, own_count=own)
        assert report["session_processes"] == report["processes"]
        return report["processes"]

    assert processes(CALLER, own=False) == "rlimit-shared"
    assert processes(CALLER, own=True) == "rlimit"
    assert processes(ROOT, own=False) == "rlimit", "an id of its own is counted by itself"


# The filter.


def judge(machine: str, name: str, *args: int, guard: bool = True) -> str:
    program = filter_program(machine=machine, guard_init=guard, guard_contents=guard)
    data = seccomp_data(numbers(machine=machine)[name], arch=AUDIT_ARCH[machine], args=args)
    return verdict(unpack(program), data)


@pytest.mark.threat(32)
@pytest.mark.parametrize("machine", MACHINES)
def test_process_1_cannot_be_signalled(machine: str) -> None:
    for signum in (9, 15, 19):
        assert judge(machine, "kill", 1, signum) == EPERM
        assert judge(machine, "kill", (7 << 32) | 1, signum) == EPERM, "a pid has 32 bits"
        assert judge(machine, "kill", 2, signum) == ALLOW
        assert judge(machine, "kill", 2**32 - 1, signum) == ALLOW, "all processes of the sandbox"
        assert judge(machine, "kill", 1, signum, guard=False) == ALLOW
    assert judge(machine, "kill", 1, 0) == judge(machine, "kill", 1, 29) == ALLOW
    for name in ("tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        assert judge(machine, name, 1, 1, 9) == EPERM
        assert judge(machine, name, 2, 2, 9) == ALLOW
    assert judge(machine, "pidfd_send_signal", 5, 9) == ENOSYS
    assert judge(machine, "fcntl", 3, 10, 9) == EPERM
    assert judge(machine, "fcntl", 3, 1024, 0) == EPERM, "leases stay refused"
    assert judge(machine, "fcntl", 3, 8, 1) == ALLOW
    assert judge(machine, "fcntl", 3, 10, 9, guard=False) == ALLOW


@pytest.mark.threat(20, 28)
@pytest.mark.parametrize("machine", MACHINES)
def test_contents_cannot_be_truncated_without_write_access(machine: str) -> None:
    truncate, create, write = 0o1000, 0o100, 1
    for name in ("setxattr", "fsetxattr", "lremovexattr", "setxattrat"):
        assert judge(machine, name) == ENOSYS
        assert judge(machine, name, guard=False) == ALLOW
    assert judge(machine, "truncate", 0, 0) == EPERM
    assert judge(machine, "truncate", 0, 0, guard=False) == ALLOW
    for name, at in (("open", 1), ("openat", 2)):
        if name not in numbers(machine=machine):
            continue

        def opened(flags: int, mode: int = 0, *, name: str = name, at: int = at) -> str:
            return judge(machine, name, *(0,) * at, flags, mode)

        assert opened(truncate) == opened(truncate | create) == EPERM
        assert opened(truncate | write) == opened(write) == opened(0) == ALLOW
        assert opened(truncate | create | write, 0o4755) == EPERM, "set-id files stay refused"


# The network.


def test_the_table_redirects_tcp_except_to_loopback() -> None:
    data = iptables_redirect(3129)
    name, hooks, count, size = struct.unpack_from("=32sIII", data)
    assert (name.rstrip(b"\0"), hooks, count) == (b"nat", 0b11011, 6)
    head = 32 + 12 + 40 + 4 + 8
    entries = data[head:]
    assert len(entries) == size
    at = struct.unpack_from("=5I5I", data, 44)
    assert at[2] == at[7] == 0, "a nat table has no FORWARD"
    output, policy = at[3], at[8]
    proto, flags, inverted = struct.unpack_from("=HBB", entries, output + 80)
    assert (proto, flags, inverted) == (6, 0, 0x10)
    assert entries[output + 4 : output + 8] == bytes((127, 0, 0, 0))
    assert entries[output + 12 : output + 16] == bytes((255, 0, 0, 0))
    target, after = struct.unpack_from("=HH", entries, output + 88)
    assert output + after == policy
    assert entries[output + target + 2 : output + target + 10] == b"REDIRECT"
    assert struct.unpack_from(">HH", entries, output + target + 48) == (3129, 3129)
    length = 0
    for _ in range(count):
        length += struct.unpack_from("=H", entries, length + 90)[0]
    assert length == size, "the entries are a complete chain"
    for port in (0, 65536, -1):
        with pytest.raises(ValueError, match=str(port)):
            iptables_redirect(port)


def test_the_rule_is_set_before_the_routes_lead_to_it() -> None:
    steps = network_steps("filtered", redirect=True, nf_tables=False)
    rule = next(at for at, s in enumerate(steps) if isinstance(s, p.SocketOption))
    routes = [
        at
        for at, step in enumerate(steps)
        if isinstance(step, p.Netlink) and step.message in {s.data for s in half_routes()}
    ]
    listeners = [at for at, s in enumerate(steps) if isinstance(s, p.Listen)]
    assert rule < routes[0] < routes[1] < listeners[0]
    usual = network_steps("filtered", redirect=True)
    assert [steps[at] for at in listeners] == [s for s in usual if isinstance(s, p.Listen)]


# What is found on the host.


def test_only_gvisor_lacks_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "is_gvisor", lambda: False)
    assert kernel.features.__wrapped__() == LINUX
    monkeypatch.setattr(kernel, "is_gvisor", lambda: True)
    found = kernel.features.__wrapped__()
    assert found.mount_trees, "found by the call, which this kernel has"
    assert not found.init_is_immune
    assert not found.own_proc_net


@pytest.mark.parametrize("gvisor", [True, False])
def test_only_in_gvisor_a_failed_step_shows_a_missing_feature(
    monkeypatch: pytest.MonkeyPatch, *, gvisor: bool
) -> None:
    monkeypatch.setattr(kernel, "is_gvisor", lambda: gvisor)
    found = _probe._of_gvisor(LINUX, p.Lockdown.op, errno.EPERM)
    assert found == (dataclasses.replace(LINUX, securebits=False) if gvisor else None)
    found = _probe._of_gvisor(LINUX, p.Netlink.op, errno.EPROTONOSUPPORT)
    assert found == (dataclasses.replace(LINUX, nf_tables=False) if gvisor else None)
    for op, error in (
        (p.Lockdown.op, errno.ENOMEM),
        (p.Netlink.op, errno.ENOMEM),
        (p.Seccomp.op, errno.EPERM),
        (FailurePlace.CLONE, errno.EPERM),
    ):
        assert _probe._of_gvisor(LINUX, op, error) is None
    assert _probe._of_gvisor(GVISOR, p.Lockdown.op, errno.EPERM) is None, "not again"


def test_a_later_command_gives_up_no_securebits() -> None:
    opened = _probe.HostFeatures(kernel=LINUX)
    later = _probe.HostFeatures(kernel=dataclasses.replace(LINUX, securebits=False))
    assert later.is_weaker_than(opened)
    assert not opened.is_weaker_than(later)


def test_strict_names_each_weaker_layer() -> None:
    posture = Posture.__new__(Posture)
    limits = (("processes", "rlimit-shared"),)
    posture.isolation = Userns().isolation(setting(), limits=limits)
    with pytest.raises(BackendUnavailableError, match="strict=True rules out") as caught:
        posture.check_strict()
    assert caught.value.missing == ("landlock", "proc_net", "read_only", "processes")
    assert "drop strict=True" in caught.value.hint
    linux = setting(kernel=LINUX, identity=ROOT, landlock_abi=6)
    posture.isolation = Userns().isolation(linux, limits=(("processes", "rlimit"),))
    posture.check_strict()


def test_a_read_only_path_on_a_tmpfs_is_refused_unless_others_own_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(source=str(tmp_path), path="/data")
    uid = os.stat(tmp_path).st_uid
    kinds = {"/": "overlay", str(tmp_path.parent): "tmpfs"}
    monkeypatch.setattr(host, "mount_points", lambda: kinds)
    with pytest.raises(PolicyError, match="/data cannot be shown read-only") as caught:
        refuse_on_tmpfs([shown], uid=uid)
    assert "upload()" in caught.value.hint
    refuse_on_tmpfs([shown], uid=uid + 1)
    refuse_on_tmpfs([dataclasses.replace(shown, writable=True)], uid=uid)
    kinds[str(tmp_path)] = "9p"
    refuse_on_tmpfs([shown], uid=uid)


def test_mount_points_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.mount_points()["/proc"] == "proc"
    line = b"24 18 0:25 / /a\\040b\\134c rw - tmpfs none rw\n"
    monkeypatch.setattr(host.Path, "read_bytes", lambda _: line)
    assert host.mount_points() == {"/a b\\c": "tmpfs"}


# Memory.


SMAPS = """\
0041f000-006d2000 r-xp 0001f000 00:1a 4                                  /usr/bin/python3.11
Rss:                2764 kB
Anonymous:             0 kB
00aca000-016d8000 rw-p 00000000 00:00 0                                  [heap]
Rss:               12000 kB
Anonymous:         12000 kB
7eb7bffd5000-7eb7c095f000 rw-s 00000000 00:1d 2                          /dev/shm/x
Rss:                9768 kB
Anonymous:             0 kB
7eb7c095f000-7eb7c1c72000 rw-s 00000000 00:05 2                          /dev/zero (deleted)
Rss:               19000 kB
Anonymous:             0 kB
7eb7d095f000-7eb7d1c72000 rw-s 00000000 00:1a 9                          /home/user/file
Rss:                7000 kB
Anonymous:             0 kB
"""


def test_memory_without_a_summary_is_counted_by_mapping(tmp_path: Path) -> None:
    processes = []
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "smaps").write_text(SMAPS)
        processes.append(memory._Process(str(tmp_path / name), int(name), 10**9, 0))
    gone = memory._Process(str(tmp_path / "3"), 3, 10**9, 0)
    found = memory._by_mapping([*processes, gone], frozenset({os.makedev(0, 0x1D)}))
    assert found == (2 * 12000 + 19000) * 1024, "shared memory counts once, mapped files do not"


def test_the_sum_alone_is_a_bound(tmp_path: Path) -> None:
    """As gVisor shows it; a thread that has ended has none."""
    (tmp_path / "status").write_text("Tgid:\t7\nVmRSS:\t  100 kB\n")
    found = memory._resident(str(tmp_path))
    assert found is not None
    assert (found.bytes, found.shared) == (100 * 1024, 0)
    (tmp_path / "status").write_text("Tgid:\t7\nVmRSS:\t  0 kB\n")
    assert memory._resident(str(tmp_path)) is None
    (tmp_path / "status").write_text("Tgid:\t7\nVmRSS:\t 9 kB\nRssAnon:\t 4 kB\nRssShmem:\t1 kB\n")
    found = memory._resident(str(tmp_path))
    assert found is not None
    assert (found.bytes, found.shared) == (5 * 1024, 1024)

"""Attacks through what a sandbox would inherit from its caller: core dumps, priorities, the OOM score."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import ISOLATED, eventually, session_of
from tests.escape.inside import attack, outside
from tests.escape.plants import drive

if TYPE_CHECKING:
    from tests.conftest import OpenSession

pytestmark = pytest.mark.spec("G2")
_CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
# The numbers of the initial namespaces. The kernel starts the program with the root of the host.
_IS_INITIAL = (
    Path("/proc/self/uid_map").read_text().split()[2] == "4294967295"
    and Path("/proc/self/ns/pid").stat().st_ino == 0xEFFFFFFC
)


@pytest.mark.needs_root
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(_CORE_PATTERN, os.W_OK) or not _IS_INITIAL,
    reason="sets kernel.core_pattern for a moment: run as root, outside a container",
)
@pytest.mark.threat(137)
async def test_a_crash_starts_no_core_dump_program(tmp_path: Path) -> None:
    """Not even after the code has tried to set another limit; a crash of the host starts it."""
    log = tmp_path / "log"
    program = tmp_path / "dump"
    program.write_text(f'#!/bin/sh\ncat >/dev/null\necho "$1" >> {log}\n')
    program.chmod(0o755)
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.getuid() and not directory.stat().st_mode & 0o001:
            directory.chmod(directory.stat().st_mode | 0o011)
    crash = "import os, resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); os.kill(os.getpid(), 11)"
    before = _CORE_PATTERN.read_text()
    codes = []
    try:
        _CORE_PATTERN.write_text(f"|{program} %e\n")
        for way in ISOLATED:
            async with session_of(way) as session:
                for text in (crash, "import os; os.kill(os.getpid(), 11)"):
                    copy = f"cp $(python -c 'import sys; print(sys._base_executable)') ./inside-{way}; true"
                    await session.exec(copy)
                    codes.append((await session.exec(["python", "-c", text])).returncode)
                codes.append((await session.exec("ulimit -c 0; kill -SEGV $$")).returncode)
        copied = tmp_path / "outside"
        copied.symlink_to("/bin/sh")
        subprocess.run([copied, "-c", "ulimit -c 0; kill -SEGV $$"], check=False)
        assert eventually(lambda: log.exists() and log.read_text().strip() != "", within_s=10)
    finally:
        _CORE_PATTERN.write_text(before)
    assert codes == [139] * len(codes), "they did crash"
    assert "python" not in log.read_text()
    assert len(log.read_text().splitlines()) == 1, log.read_text()


@pytest.mark.threat(137)
async def test_the_core_limit_cannot_be_changed(jailed: OpenSession) -> None:
    code = """
    import resource
    before = resource.getrlimit(resource.RLIMIT_CORE)
    out["before"] = list(before)
    out["set"] = attempt(resource.setrlimit, resource.RLIMIT_CORE, (0, 0))
    out["both"] = attempt(resource.prlimit, os.getpid(), resource.RLIMIT_CORE, (0, 0))
    pair = struct.pack("QQ", 0, 0)
    out["raw"] = call("setrlimit", 4, pair)
    out["high bits"] = call("setrlimit", (1 << 33) | 4, pair)
    out["after"] = list(resource.getrlimit(resource.RLIMIT_CORE))
    out["other"] = attempt(resource.setrlimit, resource.RLIMIT_NOFILE, (50, 50))
    out["files"] = list(resource.getrlimit(resource.RLIMIT_NOFILE))
    """
    async with jailed() as session:
        enforced = dict(session.isolation.limits)["core"] == "rlimit"
        found = await attack(session, code)
    assert found["after"] == found["before"]
    assert found["both"] == "EPERM"
    assert found["files"] == [50, 50]
    if enforced:
        assert found["after"] == [1, 1]
    bare = await outside(code)
    assert bare["after"] == [0, 0], "without the filter it can be lowered"


_LOOK = """
import json, os, resource
def attempt(f, *a):
    try: f(*a); return "ok"
    except OSError as exc: return type(exc).__name__
print(json.dumps({
    "oom": int(open("/proc/self/oom_score_adj").read()), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "policy": os.sched_getscheduler(0), "rt": resource.getrlimit(resource.RLIMIT_RTPRIO), "may": resource.getrlimit(resource.RLIMIT_NICE),
    "lower": attempt(lambda: open("/proc/self/oom_score_adj", "w").write("-100")),
    "hurry": attempt(os.setpriority, os.PRIO_PROCESS, 0, -1), "fifo": attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))}))
"""


@pytest.mark.needs_root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can raise its own priorities: run as root")
@pytest.mark.threat(140)
def test_no_advantage_of_the_caller_is_inherited(cell: str) -> None:
    """A caller that is protected from the OOM killer, in a hurry, and may be in real time."""
    body = """
    import json, resource
    def oom():
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-500")
    for advantage in (
        oom,
        lambda: os.setpriority(os.PRIO_PROCESS, 0, -5),
        lambda: resource.setrlimit(resource.RLIMIT_RTPRIO, (50, 50)),
        lambda: resource.setrlimit(resource.RLIMIT_NICE, (40, 40)),
        lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
    ):
        try:
            advantage()
        except (PermissionError, ValueError):
            pass  # not every root may; what it has is compared
    look = sys.argv[1]
    async with session() as sbx:
        inside = json.loads(await sbx.run_code(look))
    import subprocess
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, check=True)
    print(json.dumps({"inside": inside, "outside": json.loads(done.stdout)}))
    """
    found = json.loads(drive(cell, body, args=[_LOOK]))
    caller = found["outside"]
    had = [caller["oom"] < 0, caller["nice"] < 0, caller["policy"] == os.SCHED_RR]
    had += [caller["rt"] != [0, 0], caller["may"] != [0, 0]]
    if not any(had):
        pytest.skip("this root may raise nothing: grant SYS_NICE or SYS_RESOURCE to the container")
    inside = found["inside"]
    assert inside["oom"] == 500, "the first to go when memory runs out"
    assert inside["nice"] == 0
    assert inside["policy"] == os.SCHED_OTHER
    assert inside["rt"] == inside["may"] == [0, 0]
    assert {inside[name] for name in ("lower", "hurry", "fifo")} == {"PermissionError"}


_IOCTLS = {
    "TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCCONS": 0x541D, "TIOCSETD": 0x5423,
    "KDSKBMODE": 0x4B45, "KDSETMODE": 0x4B3A, "VT_ACTIVATE": 0x5606, "VT_LOCKSWITCH": 0x560B,
}  # fmt: skip


@pytest.mark.threat(139)
@pytest.mark.parametrize("pty", [False, True])
async def test_nothing_is_pushed_into_a_terminal(jailed: OpenSession, *, pty: bool) -> None:
    """Also with bits that the kernel ignores; with a terminal of its own, and without."""
    code = """
    for name, number in given.items():
        for high in (0, 1 << 32, 0xFFFF << 32):
            out[f"{name} {high:#x}"] = call("ioctl", 0, number | high, ctypes.create_string_buffer(b"x"))
    out["control"] = call("ioctl", 0, 0x541B, ctypes.create_string_buffer(8))
    """
    async with jailed() as session:
        if pty:
            from tests.escape.inside import program

            proc = await session.run(
                program(code, given=_IOCTLS), script_type="python", pty=True, stdout=True
            )
            text = (await proc.communicate())[0].decode().splitlines()[-1]
            found = json.loads(text)
        else:
            found = await attack(session, code, given=_IOCTLS)
    control = found.pop("control")
    assert set(found.values()) == {"EPERM"}, found
    if pty:
        assert control == "ok"
    bare = await outside(code, given=_IOCTLS)
    assert "ENOTTY" in bare.values(), "the kernel itself decides by what is open"


@pytest.mark.threat(136)
async def test_no_lease_on_a_file_of_the_caller(jailed: OpenSession, tmp_path: Path) -> None:
    """The next open() of the file, by anybody, would wait for the holder."""
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "data").write_text("data")
    code = """
    import fcntl
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    path = given["path"]
    fd, where = os.open(path, os.O_RDONLY), os.open(os.path.dirname(path), os.O_RDONLY)
    high = 7 << 32
    for name, kind in (("read", 0), ("write", 1)):
        out[name] = call("fcntl", fd, 1024, kind)
        out[name + " high"] = call("fcntl", fd, 1024 | high, kind)
    out["notify"] = call("fcntl", where, 1026, 0x80000004)
    out["delegation"] = call("fcntl", fd, 1040, 0)
    out["control"] = call("fcntl", fd, 1025, 0)
    """
    given = {"path": str(shown / "data")}
    async with jailed(read_only_paths=[str(shown)]) as session:
        found = await attack(session, code, given=given)
    assert found.pop("control") == "ok"
    assert set(found.values()) == {"EPERM"}, found
    bare = await outside(code, given=given)
    assert bare["read"] == bare["notify"] == "ok", "the host would allow it"


@pytest.mark.threat(138)
async def test_names_of_the_callers_keys_are_not_listed(jailed: OpenSession) -> None:
    name, payload = b"krb5:plant-key-77", b"payload"
    libc = ctypes.CDLL(None, use_errno=True)
    add_key, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[os.uname().machine]
    key = libc.syscall(add_key, b"user", name, payload, len(payload), ctypes.c_int(-4))
    if key < 0:
        pytest.skip(f"no key can be made here: {os.strerror(ctypes.get_errno())}")
    try:
        if name.decode() not in Path("/proc/keys").read_text():
            pytest.skip("/proc/keys of this container lists no key: run on a host, or unmask /proc")
        async with jailed() as session:
            listed = (await session.exec("cat /proc/keys /proc/key-users")).stdout
        assert name.decode() not in listed
        assert f"{key & 0xFFFFFFFF:08x}" not in listed
    finally:
        libc.syscall(keyctl, 9, ctypes.c_int(key), ctypes.c_int(-4))


@pytest.mark.threat(140)
async def test_limits_that_the_kernel_counts_by_user_leave_room(jailed: OpenSession) -> None:
    """A caller can always use more than its sandboxes together."""
    code = """
    import resource
    for name in ("SIGPENDING", "MSGQUEUE", "MEMLOCK", "RTPRIO", "NICE", "NPROC", "NOFILE"):
        out[name] = list(resource.getrlimit(getattr(resource, "RLIMIT_" + name)))
    """
    async with jailed() as session:
        found = await attack(session, code)
        shares_id = session.isolation.ids == "caller"
    for name in ("SIGPENDING", "MSGQUEUE", "MEMLOCK"):
        soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
        assert soft == resource.RLIM_INFINITY or found[name][1] <= soft // 2
    assert found["RTPRIO"] == found["NICE"] == [0, 0]
    if shares_id:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert found["NOFILE"][1] <= max(min(soft * 3 // 4, soft - 384), soft // 2)

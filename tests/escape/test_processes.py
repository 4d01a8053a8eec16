"""Attacks on other processes: seeing, signalling, reading and crippling them."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import json
import os
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.escape.inside import attack, outside, program
from tests.escape.plants import SECRET, Victim

if TYPE_CHECKING:
    from tests.conftest import OpenSession

    from union import sandbox as sb

pytestmark = pytest.mark.spec("G2")


@pytest.mark.threat(31)
async def test_a_host_process_is_not_in_proc(jail: sb.Session, victim: Victim) -> None:
    """Its token stands on its command line. A masked /proc is reported as inherited."""
    code = """
    lines = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                lines[entry] = read(f"/proc/{entry}/cmdline")
            except OSError:
                pass
    out["hits"] = [pid for pid, line in lines.items() if given["mark"] in line]
    out["own"] = any("main.py" in line for line in lines.values())
    """
    found = await attack(jail, code, given=victim.as_given())
    assert found["own"], "its own processes are there"
    assert str(victim.pid) in (await outside(code, given=victim.as_given()))["hits"]
    if jail.isolation.proc == "fresh":
        assert found["hits"] == []
    else:
        assert jail.isolation.proc == "inherited"


@pytest.mark.threat(32)
async def test_signals_to_host_processes_do_not_arrive(jail: sb.Session, victim: Victim) -> None:
    """kill, tgkill, pidfd and group signals, to a plant and to the driving process."""
    received: list[int] = []
    old = {n: signal.signal(n, lambda n, _: received.append(n)) for n in (10, 12)}
    code = """
    for pid in (given["pid"], given["driver"]):
        if pid == os.getpid() or pid == os.getpgid(0):
            continue
        for number in (10, 12):
            out[f"{pid} {number}"] = [attempt(os.kill, pid, number), attempt(os.killpg, pid, number),
                libc.tgkill(pid, pid, number), attempt(lambda: signal.pidfd_send_signal(os.pidfd_open(pid), number))]
    for number in (10, 12):
        signal.signal(number, lambda n, f: out.setdefault("self", []).append(n))
        attempt(os.kill, -1, number)
        os.kill(os.getpid(), number)
    """
    try:
        found = await attack(jail, code, given=victim.as_given())
        assert set(found.pop("self")) == {10, 12}, "a signal to itself arrives"
        assert received == []
        assert victim.report()["signals"] == []
        assert victim.receives(12)
        os.kill(os.getpid(), 12)
        assert received == [12]
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


_MEMORY = """
pid, address = given["pid"], given["address"]
class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(b"overwritten")
near, far = Vec(ctypes.addressof(room), 9), Vec(address, 9)
def vm(function):
    ctypes.set_errno(0)
    done = function(pid, ctypes.byref(near), 1, ctypes.byref(far), 1, 0)
    return "ok" if done > 0 else errno.errorcode[ctypes.get_errno()]
def mem(flags):
    fd = os.open(f"/proc/{pid}/mem", flags)
    os.pread(fd, 9, address) if flags == os.O_RDONLY else os.pwrite(fd, b"overwrite", address)
out["read"] = vm(libc.process_vm_readv)
out["mem"] = attempt(mem, os.O_RDONLY)
out["maps"] = attempt(lambda: open(f"/proc/{pid}/maps").read() or 1 / 0)
if given["change"]:
    out["write"] = vm(libc.process_vm_writev)
    out["memwrite"] = attempt(mem, os.O_RDWR)
    for number in (16, 0x4206):  # ATTACH, SEIZE
        out[f"ptrace {number}"] = call("ptrace", number, pid, 0, 0)
"""


@pytest.mark.threat(33)
async def test_the_memory_of_a_host_process_is_out_of_reach(
    jail: sb.Session, victim: Victim
) -> None:
    """ptrace, process_vm_readv and writev, /proc/<pid>/mem."""
    found = await attack(jail, _MEMORY, given=victim.as_given() | {"change": True})
    assert "ok" not in found.values(), found
    assert victim.report()["memory"] == "untouched"
    bare = await outside(_MEMORY, given=victim.as_given() | {"change": False})
    if bare["read"] != "EPERM":  # where Yama lets only parents look, the host may not either
        assert bare["read"] == bare["maps"] == "ok"


@pytest.mark.threat(34)
async def test_a_descriptor_cannot_be_taken_from_a_host_process(
    jail: sb.Session, victim: Victim
) -> None:
    """pidfd_getfd; also from a process inside, as the filter refuses it whole."""
    code = """
    out["open"] = attempt(os.pidfd_open, given["pid"])
    own = os.pidfd_open(os.getpid())
    out["own"] = call("pidfd_getfd", own, 0, 0)
    try:
        out["theirs"] = call("pidfd_getfd", os.pidfd_open(given["pid"]), given["fd"], 0)
    except OSError as exc:
        out["theirs"] = errno.errorcode[exc.errno]
    """
    found = await attack(jail, code, given=victim.as_given())
    assert found["own"] == "EPERM"
    assert found["theirs"] != "ok"
    assert (await outside(code, given=victim.as_given()))["own"] == "ok"


@pytest.mark.threat(35)
async def test_proc_entries_of_a_host_process_are_closed(jail: sb.Session, victim: Victim) -> None:
    """environ, cwd, root, fd, mem, exe: absent, or closed where /proc is inherited."""
    code = """
    base = f"/proc/{given['pid']}"
    out["environ"] = attempt(lambda: given["mark"] in read(base + "/environ") or 1 / 0)
    out["cwd"] = attempt(os.readlink, base + "/cwd")
    out["cwd file"] = attempt(read, base + "/cwd/held")
    out["root"] = attempt(os.listdir, base + "/root/")
    out["fd"] = attempt(os.listdir, base + "/fd")
    out["fd link"] = attempt(os.readlink, f"{base}/fd/{given['fd']}")
    out["fd file"] = attempt(read, f"{base}/fd/{given['fd']}")
    out["mem"] = attempt(os.open, base + "/mem", os.O_RDONLY)
    out["exe"] = attempt(os.open, base + "/exe", os.O_RDONLY)
    out["map_files"] = attempt(os.listdir, base + "/map_files")
    out["ns"] = attempt(os.open, base + "/ns/mnt", os.O_RDONLY)
    out["oom"] = attempt(write, base + "/oom_score_adj", "1000", os.O_WRONLY)
    """
    found = await attack(jail, code, given=victim.as_given())
    if jail.isolation.proc == "inherited":
        found.pop("fd")  # the kernel lets an owner count them; what they are stays closed
    assert "ok" not in found.values(), found
    environ = Path(f"/proc/{victim.pid}/environ").read_text()
    assert SECRET in environ, "the plant has it"


@pytest.mark.threat(35, 41)
async def test_the_first_process_of_the_sandbox_is_closed_too(jail: sb.Session) -> None:
    """It holds the socket to the host."""
    code = """
    # In an inherited /proc the parent has another pid, which its status contains.
    parent = int(read("/proc/self/status").split("PPid:")[1].split()[0])
    base = f"/proc/{parent}"
    out["fd"] = attempt(os.listdir, base + "/fd")
    out["mem"] = attempt(os.open, base + "/mem", os.O_RDWR)
    out["environ"] = attempt(read, base + "/environ")
    out["maps"] = attempt(read, base + "/maps")
    out["ptrace"] = call("ptrace", 16, 1, 0, 0)
    child = subprocess.Popen(["sleep", "5"])
    out["control"] = attempt(os.listdir, f"/proc/{child.pid}/fd") if given["fresh"] else "ok"
    child.kill()
    """
    found = await attack(jail, code, given={"fresh": jail.isolation.proc == "fresh"})
    assert found.pop("control") == "ok"
    assert "ok" not in found.values(), found


@pytest.mark.threat(36)
async def test_limits_of_host_processes_stay_as_they_are(jail: sb.Session, victim: Victim) -> None:
    """prlimit, nice, affinity and I/O priority of a plant and of the driving process."""
    import resource

    code = """
    import resource
    for pid in (given["pid"], given["driver"]):
        if pid < 10:
            continue  # the owner is process 1 of a container; inside, that is the sandbox's own
        out[str(pid)] = [attempt(resource.prlimit, pid, resource.RLIMIT_NOFILE, (8, 8)),
            attempt(os.setpriority, os.PRIO_PROCESS, pid, 19), attempt(os.sched_setaffinity, pid, {0}),
            attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))]
    out["control"] = attempt(resource.prlimit, 0, resource.RLIMIT_NOFILE, (64, 1024))
    """
    own = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0), os.nice(0)
    before = victim.report()
    found = await attack(jail, code, given=victim.as_given())
    assert found.pop("control") == "ok"
    assert found, "at least one number was tried"
    assert all(set(tries) == {"ESRCH"} for tries in found.values()), found
    assert victim.report() == before
    now = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0), os.nice(0)
    assert now == own
    resource.prlimit(victim.pid, resource.RLIMIT_NOFILE, (8, 1024))
    assert victim.report() != before, "the host can"


@pytest.mark.threat(37)
@pytest.mark.spec("B8")
async def test_a_parallel_run_of_any_session_cannot_be_read_or_signalled(
    jailed: OpenSession,
) -> None:
    """One run has a key in its environment; neighbours look for it."""
    wait = "import os, sys; print(os.environ['KEY'], flush=True); sys.stdin.read()"
    look = """
    hits = []
    for entry in os.listdir("/proc"):
        for name in ("environ", "cmdline", "fd/0", "mem"):
            if not entry.isdigit():
                continue
            try:
                with open(f"/proc/{entry}/{name}", "rb") as file:
                    given["mark"].encode() in file.read(65536) and hits.append(f"{entry}/{name}")
            except OSError:
                pass
    out["hits"] = hits
    out["own"] = "LOOKER" in read("/proc/self/environ")
    """
    key = secrets.token_hex(16)  # of this test alone: where /proc is shared, so are its neighbours
    looker = {"LOOKER": "1"}
    async with jailed(env=looker) as one, jailed(env=looker) as two:
        holder = await one.run(
            wait, script_type="python", env={"KEY": key}, stdin=True, stdout=True, timeout_s=30
        )
        assert await anext(holder.iter_stdout_lines()) == key
        for session in (one, two):
            found = await attack(session, look, given={"mark": key})
            assert found["own"]
            assert found["hits"] == []
            await session.exec(["kill", "-9", "-1"])
        assert holder.returncode is None, "the neighbour is alive"
        assert holder.stdin is not None
        holder.stdin.close()
        assert await holder.wait() == 0


_IPC = """
def sysv(key, make):
    flags = 0o666 | (0o1000 if make else 0)
    return {"shm": libc.shmget(key, 4096, flags), "sem": libc.semget(key, 1, flags),
            "msg": libc.msgget(key, flags)}
"""


@pytest.mark.threat(38)
@pytest.mark.spec("B8")
async def test_ipc_objects_of_the_host_are_not_found(jail: sb.Session) -> None:
    """SysV memory, semaphores and queues by key; POSIX queues by name."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    key, queue = 0x5AB0 + os.getpid() % 50000, f"/sbx-plant-{os.getpid()}".encode()
    shm = libc.shmget(key, 4096, 0o1666)
    sem = libc.semget(key, 1, 0o1666)
    msg = libc.msgget(key, 0o1666)
    posix = libc.mq_open(queue, os.O_CREAT | os.O_RDWR, 0o666, None)
    try:
        assert min(shm, sem, msg) >= 0
        code = _IPC + (
            "out['found'] = sysv(given['key'], False)\n"
            "out['control'] = sysv(given['key'], True)\n"
            "out['queue'] = libc.mq_open(given['queue'].encode(), os.O_RDWR)\n"
            "out['listed'] = [len(read('/proc/sysvipc/' + n).splitlines()) for n in ('shm', 'sem', 'msg')]\n"
        )
        given = {"key": key, "queue": queue.decode()}
        found = await attack(jail, code, given=given)
        assert set(found["found"].values()) == {-1}, found
        assert -1 not in found["control"].values(), "it can make its own"
        assert found["queue"] == -1
        again = await attack(jail, code, given=given)
        assert set(again["found"].values()) == {-1}, "the last run's are gone as well"
        bare = await outside(_IPC + "out['found'] = sysv(given['key'], False)", given=given)
        assert -1 not in bare["found"].values(), "the plants are there"
    finally:
        libc.shmctl(shm, 0, None)
        libc.semctl(sem, 0, 0)
        libc.msgctl(msg, 0, None)
        if posix >= 0:
            libc.mq_unlink(queue)
            os.close(posix)


@pytest.mark.threat(37)
async def test_a_run_kept_in_the_background_cannot_reach_a_later_one(jail: sb.Session) -> None:
    """Its spy loop sees only processes of its own run."""
    spy = """
    seen = set()
    end = time.monotonic() + 0.8
    print("spying", flush=True)
    while time.monotonic() < end:
        for entry in os.listdir("/proc"):
            try:
                seen.add(read(f"/proc/{entry}/environ"))
            except OSError:
                pass
    out["hit"] = any("LATER-RUN" in text for text in seen)
    out["own"] = any("SPY-RUN" in text for text in seen)
    """
    proc = await jail.run(
        program(spy), script_type="python", stdout=True, env={"NAME": "SPY-RUN"}, timeout_s=20
    )
    lines = proc.iter_stdout_lines()
    assert await anext(lines) == "spying"
    await jail.run("sleep 0.3", env={"NAME": "LATER-RUN"})
    found = json.loads([line async for line in lines][-1])
    assert found == {"hit": False, "own": True}

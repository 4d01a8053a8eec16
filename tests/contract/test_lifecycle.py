"""Opening, closing, time limits of a session, and sessions beside each other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
import threading
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import (
    ISOLATED,
    MACHINE,
    REMOTE,
    SOON_S,
    OpenSession,
    descriptors,
    eventually,
    host_dir,
    interpreter_under,
    sandbox_processes,
    session_of,
)

from union import sandbox as sb

if TYPE_CHECKING:
    from pathlib import Path

CALLS = {
    "run": lambda s: s.run("true"),
    "exec": lambda s: s.exec("true"),
    "run_code": lambda s: s.run_code("pass"),
    "put_bytes": lambda s: s.put_bytes("f", b""),
    "get_bytes": lambda s: s.get_bytes("f"),
}


@pytest.mark.spec("B1")
def test_describing_a_session_does_no_io(open_session: OpenSession) -> None:
    open_session()  # the server of the remote ways is started by the first of them
    before = descriptors()
    session = open_session(host_work_dir="/nonexistent/dir", read_only_paths=["/nonexistent/x"])
    assert descriptors() == before
    assert session.backend in repr(session)


@pytest.mark.spec("B1", "B3")
async def test_open_and_close_by_hand(open_session: OpenSession) -> None:
    session = open_session()
    assert await session.open() is session
    try:
        assert (await session.exec("echo hi")).stdout == "hi\n"
        work = host_dir(session)
        assert os.path.isdir(work)
    finally:
        await session.close()
    assert not os.path.exists(work)


@pytest.mark.spec("B2")
async def test_close_is_idempotent_also_at_the_same_time(open_session: OpenSession) -> None:
    session = await open_session().open()
    await session.run("sleep 60", background=True)
    work = host_dir(session)
    await asyncio.gather(session.close(), session.close(), session.close())
    await session.close()
    assert not os.path.exists(work)
    assert not sandbox_processes()


@pytest.mark.spec("B2")
async def test_cancelling_close_leaves_no_half_session(open_session: OpenSession) -> None:
    session = await open_session().open()
    await session.run("sleep 60", background=True)
    work = host_dir(session)
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.gather(closing, return_exceptions=True)
    await session.close()
    assert not os.path.exists(work)


@pytest.mark.spec("B2")
@pytest.mark.parametrize("name", CALLS)
async def test_use_before_open(open_session: OpenSession, name: str) -> None:
    session = open_session()
    with pytest.raises(sb.SessionClosedError, match="not open") as caught:
        await CALLS[name](session)
    assert "open()" in caught.value.hint
    assert caught.value.code == "session-closed"
    await session.close()


@pytest.mark.spec("B2")
@pytest.mark.parametrize("name", CALLS)
async def test_use_after_close(open_session: OpenSession, name: str) -> None:
    async with open_session() as session:
        pass
    with pytest.raises(sb.SessionClosedError, match="closed"):
        await CALLS[name](session)


@pytest.mark.spec("B2", "B9")
async def test_facts_need_an_open_session(open_session: OpenSession) -> None:
    session = open_session()
    for fact in (lambda: session.work_dir, lambda: session.isolation, session.fs_allowlist):
        with pytest.raises(sb.SessionClosedError):
            fact()
    async with session:
        pass
    before = descriptors()
    with pytest.raises(sb.SessionClosedError):
        session.fs_allowlist()
    assert descriptors() == before


@pytest.mark.spec("B2", "B9")
async def test_facts_of_a_closed_session_take_nothing_from_the_host(
    open_session: OpenSession,
) -> None:
    async with open_session() as session:
        known = session.isolation
    before = descriptors()
    with contextlib.suppress(sb.SessionClosedError):
        assert session.isolation == known
    assert descriptors() == before


@pytest.mark.spec("B1", "B2")
async def test_opening_twice(open_session: OpenSession) -> None:
    async with open_session() as session:
        with pytest.raises(sb.SessionClosedError, match="open already"):
            await session.open()
        assert (await session.exec("echo still")).stdout == "still\n"
    with pytest.raises(sb.SessionClosedError, match="closed"):
        await session.open()


@pytest.mark.spec("B2")
async def test_closing_what_was_never_opened(open_session: OpenSession) -> None:
    session = open_session()
    await session.close()
    with pytest.raises(sb.SessionClosedError):
        await session.open()


@pytest.mark.spec("B2", "C8", "G4")
async def test_closing_while_commands_run(open_session: OpenSession) -> None:
    async with open_session() as session:
        piped = await session.run("echo up; sleep 60", stdout=True)
        waiting = asyncio.create_task(session.exec("setsid sleep 60 & sleep 60"))
        background = await session.run("sleep 60", background=True)
        assert await anext(piped.iter_stdout()) == b"up\n"
        began = time.monotonic()
    assert time.monotonic() - began < SOON_S
    assert not sandbox_processes()
    for code, reason in (
        (await piped.wait(), piped.termination_reason),
        (await background.wait(), background.termination_reason),
        ((await waiting).returncode, (await waiting).termination_reason),
    ):
        assert (code, reason) == (137, "closed")


@pytest.mark.spec("B2", "D6")
async def test_closing_with_unread_output_does_not_hang_its_reader(
    open_session: OpenSession,
) -> None:
    async with open_session() as session:
        flood = await session.run("head -c 8000000 /dev/zero; sleep 60", stdout=True)
        reader = asyncio.create_task(flood.communicate())
        await asyncio.sleep(0.2)
    out, _ = await asyncio.wait_for(reader, SOON_S)
    assert out == bytes(len(out))
    assert flood.termination_reason == "closed"


@pytest.mark.spec("B2")
async def test_an_exception_inside_the_block_closes(open_session: OpenSession) -> None:
    session = open_session()
    seen: list[str] = []

    async def work() -> None:
        async with session:
            await session.run("sleep 60", background=True)
            seen.append(host_dir(session))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await work()
    assert not os.path.exists(seen[0])
    assert not sandbox_processes()


@pytest.mark.spec("B2")
async def test_a_cancellation_inside_the_block_closes(open_session: OpenSession) -> None:
    seen: list[str] = []

    async def work() -> None:
        async with open_session() as session:
            seen.append(host_dir(session))
            await session.exec("sleep 60")

    task = asyncio.create_task(work())
    while not seen or not sandbox_processes():
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not os.path.exists(seen[0])
    assert not sandbox_processes()


@pytest.mark.spec("B2")
async def test_a_cancelled_open_leaves_nothing(open_session: OpenSession) -> None:
    before = descriptors()
    for delay in (0, 0, 0.001, 0.003):
        task = asyncio.create_task(open_session().open())
        await asyncio.sleep(delay)
        task.cancel()
        found = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(found, sb.Session):
            await found.close()
    assert eventually(lambda: not sandbox_processes())
    await asyncio.sleep(0.1)
    assert sum((descriptors() - before).values()) <= 3  # the launcher, when it was started here


@pytest.mark.spec("B2", "B3")
async def test_a_pinned_work_dir_survives(open_session: OpenSession, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("before")
    async with open_session(host_work_dir=str(tmp_path)) as session:
        assert session.work_dir == str(tmp_path)
        assert (await session.exec("pwd; cat mine")).stdout == f"{tmp_path}\nbefore"
        await session.run("echo made > inside; mkdir d; echo x > d/y")
    assert (tmp_path / "mine").read_text() == "before"
    assert (tmp_path / "inside").read_text() == "made\n"
    assert (tmp_path / "inside").stat().st_uid == os.geteuid()
    async with open_session(host_work_dir=str(tmp_path)) as session:
        assert (await session.exec("cat inside d/y")).stdout == "made\nx\n"


@pytest.mark.spec("B3")
async def test_a_path_object_pins_too(open_session: OpenSession, tmp_path: Path) -> None:
    async with open_session(host_work_dir=tmp_path) as session:
        assert session.work_dir == str(tmp_path)


@pytest.mark.spec("B3")
async def test_the_private_work_dir_is_private(sbx: sb.Session) -> None:
    found = os.stat(host_dir(sbx))
    assert stat.S_IMODE(found.st_mode) == 0o700
    # Root without id-mapped mounts gives it to the id that sandboxed code has, and to no other.
    given = sbx.isolation.ids == "unprivileged" and found.st_uid >= 2_000_000_000
    assert found.st_uid == os.geteuid() or given
    assert (await sbx.exec("pwd")).stdout == sbx.work_dir + "\n"


@pytest.mark.spec("B2")
async def test_a_private_work_dir_is_removed_whatever_is_in_it(open_session: OpenSession) -> None:
    async with open_session() as session:
        await session.run(
            "mkdir -p a/b/c; touch a/b/c/f; mkfifo a/p; ln -s / a/root; chmod 0 a/b a"
        )
        work = host_dir(session)
    assert not os.path.lexists(work)


@pytest.mark.spec("B4")
async def test_only_the_work_dir_persists(jail: sb.Session) -> None:
    await jail.run("echo x > kept; echo x > /tmp/lost; echo x > /dev/shm/lost; touch .hidden")
    found = await jail.exec("ls -A")
    assert found.stdout.split() == [".hidden", ".sandbox-venv", "kept"]
    for place in ("/tmp", "/dev/shm"):
        found = await jail.exec(["ls", "-A", place])
        assert found.ok
        own = os.path.basename(jail.work_dir)  # where there is no /var/tmp, it is in /tmp
        assert set(found.stdout.split()) <= {own} | interpreter_under(place)


@pytest.mark.spec("B4")
async def test_scratch_is_capped_and_the_rest_read_only(jail: sb.Session) -> None:
    sizes = await jail.run_code(
        """
        import os
        for place in ("/tmp", "/dev/shm"):
            found = os.statvfs(place)
            print(found.f_blocks * found.f_frsize >> 20)
        """
    )
    limits = (sb.constants.DEFAULT_TMP_MIB, sb.constants.DEFAULT_SHM_MIB)
    assert tuple(map(int, sizes.split())) == limits
    for place in ("/", "/usr", "/etc", "/usr/bin", "/run", "/dev"):
        found = await jail.exec(f"touch {place}/x")
        assert found.returncode != 0, place


@pytest.mark.spec("B7")
async def test_a_sessions_time_limit(open_session: OpenSession) -> None:
    async with open_session(timeout_s=2) as session:
        work = host_dir(session)
        began = time.monotonic()
        result = await session.exec("echo early; sleep 60")
        assert time.monotonic() - began < SOON_S
        assert result.termination_reason == "timeout"
        assert result.returncode in {137, 143}
        assert result.stdout == "early\n"
        with pytest.raises(sb.SessionClosedError, match="timeout_s=2"):
            await session.exec("true")
        assert eventually(lambda: not sandbox_processes())
    assert not os.path.exists(work)


@pytest.mark.spec("B7")
async def test_an_idle_session_closes_when_its_time_is_up(open_session: OpenSession) -> None:
    session = await open_session(timeout_s=0.2).open()
    work = host_dir(session)
    async with asyncio.timeout(SOON_S):
        while os.path.exists(work):
            await asyncio.sleep(0.02)
    with pytest.raises(sb.SessionClosedError, match="timeout_s"):
        await session.run("true")
    await session.close()


# The clock belongs to the session or to its server, not to the backend.
@pytest.mark.spec("B7", "B2")
@pytest.mark.parametrize("way", [ISOLATED[-1], REMOTE + ISOLATED[-1]])
async def test_closing_in_time_cancels_the_time_limit(open_session: OpenSession) -> None:
    async with open_session(timeout_s=5) as session:
        assert (await session.exec("echo hi")).ok
    await asyncio.sleep(5.1)
    with pytest.raises(sb.SessionClosedError, match="the session is closed"):
        await session.run("true")


@pytest.mark.spec("B8")
async def test_runs_of_one_session_overlap(sbx: sb.Session) -> None:
    """Each of eight commands waits until all have begun."""
    meet = "touch begun.{n}; while set -- begun.*; test $# -lt 8; do sleep 0.05; done; echo {n}"
    results = await asyncio.gather(
        *(sbx.exec(meet.format(n=n), timeout_s=SOON_S) for n in range(8))
    )
    assert [r.stdout for r in results] == [f"{n}\n" for n in range(8)]


@pytest.mark.spec("B8")
async def test_sessions_are_independent(open_session: OpenSession) -> None:
    async with open_session() as one, open_session() as two:
        assert host_dir(one) != host_dir(two)
        await one.run("echo one > f")
        await two.run("echo two > f")
        await one.close()
        assert (await two.exec("cat f")).stdout == "two\n"


@pytest.mark.spec("B8")
async def test_no_session_sees_another(jail: sb.Session) -> None:
    async with session_of(jail.backend) as other:
        marker = "union-contract-marker"
        listening = await other.run(
            f"""
            import os, socket, time
            from multiprocessing import shared_memory
            held = socket.socket(socket.AF_UNIX)
            held.bind("\\0{marker}")
            held.listen()
            open("secret", "w").write("x")
            print("up", flush=True)
            time.sleep(60)
            """,
            script_type="python",
            env={"MARKER": marker},
            stdout=True,
        )
        assert await anext(listening.iter_stdout_lines()) == "up"
        probe = f"""
            import glob, os, socket
            print(os.path.exists({other.work_dir!r}))
            try:
                socket.socket(socket.AF_UNIX).connect("\\0{marker}")
                print("connected")
            except OSError as exc:
                print(type(exc).__name__)
            seen = []
            for path in glob.glob("/proc/[0-9]*/environ"):
                try:
                    if {marker!r} in open(path).read():
                        seen.append(path)
                except OSError:
                    pass
            print(len(seen))
        """
        assert await jail.run_code(probe) == "False\nConnectionRefusedError\n0\n"
        # The control: the same probe, from where it must succeed.
        own = await jail.exec(
            f"""
            import socket
            held = socket.socket(socket.AF_UNIX)
            held.bind("\\0{marker}")
            held.listen()
            socket.socket(socket.AF_UNIX).connect("\\0{marker}")
            print("connected")
            """,
            script_type="python",
        )
        assert own.stdout == "connected\n"


@pytest.mark.spec("B8")
async def test_no_session_shares_ipc_objects(jail: sb.Session) -> None:
    async with session_of(jail.backend) as other:
        make = """
            import ctypes, time
            libc = ctypes.CDLL(None)
            print(libc.shmget(0x51423, 4096, 0o1666) >= 0, flush=True)
            time.sleep(60)
            """
        holder = await other.run(make, script_type="python", stdout=True)
        assert await anext(holder.iter_stdout_lines()) == "True"
        find = "import ctypes; print(ctypes.CDLL(None).shmget(0x51423, 4096, 0o666))"
        assert await jail.run_code(find) == "-1\n"


@pytest.mark.spec("B8")
def test_each_thread_and_loop_may_have_its_own(open_session: OpenSession) -> None:
    found: dict[int, str] = {}

    async def work(number: int) -> None:
        async with open_session() as session:
            out = ""
            for _ in range(3):
                out = (await session.exec(f"echo {number} >> f; cat f")).stdout
            found[number] = out

    threads = [threading.Thread(target=lambda n=n: asyncio.run(work(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {n: f"{n}\n" * 3 for n in range(4)}


@pytest.mark.spec("B8", "C10")
def test_a_session_stays_with_its_loop(open_session: OpenSession) -> None:
    with asyncio.Runner() as first, asyncio.Runner() as second:
        session = first.run(open_session().open())
        with pytest.raises(sb.SandboxUsageError, match="another event loop"):
            second.run(session.exec("true"))
        assert first.run(session.exec("echo ok")).stdout == "ok\n"
        first.run(session.close())


@pytest.mark.spec("B8")
def test_one_loop_after_another(open_session: OpenSession) -> None:
    async def once() -> str:
        async with open_session() as session:
            return await session.run_code("print(1)")

    assert [asyncio.run(once()) for _ in range(3)] == ["1\n"] * 3


@pytest.mark.spec("B9")
async def test_the_session_reports_what_it_enforces(sbx: sb.Session, way: str) -> None:
    backend = way.removeprefix(REMOTE).removeprefix(MACHINE)
    assert sbx.backend == backend
    report = sbx.isolation.to_dict()
    assert json.loads(json.dumps(report))["backend"] == backend
    assert "namespaces" in str(sbx.isolation)
    if backend == "none":
        assert not report["namespaces"]
        assert report["egress"] == "none"
        assert "tmpfs" not in report["limits"].values(), "no scratch of its own, so no cap on it"
    elif backend == "landlock":
        assert not report["namespaces"]
        assert (report["root"], report["proc"], report["egress"]) == ("host", "hidden", "mediated")
        assert (report["tmp"], report["shm"]) == ("directory", "none")
        assert report["signals"] == ("kernel" if report["landlock_abi"] >= 6 else "notified")
        assert report["capabilities"] == ()
        assert report["no_new_privs"] is True
    else:
        assert {"user", "mount", "pid", "ipc", "uts", "cgroup", "net"} == set(report["namespaces"])
        assert report["capabilities"] == ()
        assert report["no_new_privs"]
        assert report["seccomp"]
        assert report["limits"]["tmp"] == "tmpfs"


@pytest.mark.spec("B9", "D2")
async def test_the_process_carries_the_same_report(sbx: sb.Session) -> None:
    proc = await sbx.run("true")
    assert proc.isolation == sbx.isolation
    assert proc.backend == sbx.backend


@pytest.mark.spec("G1")
async def test_none_warns_every_time() -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="isolates nothing"):
            await (await session_of("none").open()).close()


@pytest.mark.spec("B2", "G4")
async def test_cycles_leave_no_descriptor_behind(open_session: OpenSession) -> None:
    async def cycle() -> None:
        async with open_session() as session:
            await session.exec("echo x; echo y >&2", stdin=b"z")
            piped = await session.run("cat", stdin=sb.PIPE, stdout=True)
            await piped.communicate(b"data")
            await session.run("sleep 60", background=True)

    await cycle()
    before = descriptors()
    for _ in range(10):
        await cycle()
    assert descriptors() == before

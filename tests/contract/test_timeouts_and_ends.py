"""Ends of commands: timeouts, signals and limits, with the reasons and codes reported."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S, START, OpenSession, eventually, sandbox_processes

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def gone() -> bool:
    return eventually(lambda: not sandbox_processes())


STUBBORN = {
    "setsid child holds the pipe": "setsid sleep 60 & echo kept; exec sleep 60",
    "double fork holds the pipe": "(setsid sh -c 'sleep 60 & sleep 60' &); echo kept; sleep 60",
    "only a left-over child": "echo kept; setsid sh -c 'trap \"\" TERM; sleep 60; sleep 60' & wait",
    "stopped": "echo kept; kill -STOP $$; sleep 60",
    "ignores TERM": "trap '' TERM INT HUP; echo kept; while :; do sleep 60; done",
    "busy": "echo kept; while :; do :; done",
    "many": "echo kept; for i in 1 2 3 4 5 6 7 8 9; do setsid sleep 60 & done; wait",
}


@pytest.mark.spec("C7")
async def test_a_time_limit_ends_the_whole_tree(sbx: sb.Session) -> None:
    """All kinds at once, because each takes its time limit."""

    async def ended(case: str) -> tuple[str, float, sb.ExecResult]:
        began = time.monotonic()
        result = await sbx.exec(STUBBORN[case], timeout_s=2 * START)
        return case, time.monotonic() - began, result

    for case, took, result in await asyncio.gather(*map(ended, STUBBORN)):
        assert 1.95 * START < took < SOON_S, case
        assert result.termination_reason == "timeout", case
        assert result.returncode in {137, 143}, case
        assert result.stdout == "kept\n", case
    assert gone()
    assert (await sbx.exec("echo usable")).stdout == "usable\n"


@pytest.mark.spec("C7")
async def test_a_fork_bomb_of_modest_size_ends_in_time(jail: sb.Session) -> None:
    began = time.monotonic()
    result = await jail.exec(
        "i=0; while [ $i -lt 150 ]; do setsid sleep 60 & i=$((i+1)); done; wait",
        timeout_s=1,
    )
    assert time.monotonic() - began < SOON_S
    assert result.termination_reason == "timeout"
    assert eventually(lambda: not sandbox_processes())


@pytest.mark.spec("C7")
async def test_an_obedient_command_ends_by_term_and_may_say_goodbye(sbx: sb.Session) -> None:
    polite = await sbx.exec("trap 'echo bye; exit 9' TERM; sleep 60 & wait", timeout_s=1.5)
    assert (polite.stdout, polite.returncode, polite.termination_reason) == ("bye\n", 9, "timeout")
    plain = await sbx.exec("exec sleep 60", timeout_s=0.3)
    assert (plain.returncode, plain.termination_reason) == (143, "timeout")


@pytest.mark.spec("C7")
async def test_a_command_that_ignores_sigterm_is_killed(sbx: sb.Session) -> None:
    began = time.monotonic()
    result = await sbx.exec(["python", "-c", STUBBORN_PYTHON], timeout_s=1.5 * START)
    assert time.monotonic() - began < SOON_S
    assert (result.returncode, result.termination_reason) == (137, "timeout")


STUBBORN_PYTHON = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"


@pytest.mark.spec("C7")
async def test_a_time_limit_on_a_streamed_command(sbx: sb.Session) -> None:
    text = "echo a; setsid sleep 60 & sleep 60"
    proc = await sbx.run(text, stdout=True, timeout_s=1.5 * START)
    began = time.monotonic()
    assert [line async for line in proc.iter_stdout_lines()] == ["a"]
    assert await proc.wait() == 143
    assert time.monotonic() - began < SOON_S
    assert proc.termination_reason == "timeout"


@pytest.mark.spec("C7", "D6")
async def test_a_timeout_of_a_command_whose_output_is_not_read(sbx: sb.Session) -> None:
    proc = await sbx.run("yes", stdout=True, timeout_s=START)
    began = time.monotonic()
    while proc.returncode is None and time.monotonic() - began < SOON_S:
        await asyncio.sleep(0.02)
    assert time.monotonic() - began < SOON_S
    assert gone()
    out, _ = await proc.communicate()
    assert out.startswith(b"y\ny\n")
    assert proc.termination_reason == "timeout"


@pytest.mark.spec("C7")
async def test_a_time_limit_on_python_and_on_the_background(sbx: sb.Session) -> None:
    with pytest.raises(sb.SandboxCommandError, match="timeout") as caught:
        await sbx.run_code(
            "import time; print('x', flush=True); time.sleep(60)", timeout_s=1.5 * START
        )
    assert caught.value.result.stdout == "x\n"
    proc = await sbx.run("sleep 60", background=True, timeout_s=0.3)
    assert await asyncio.wait_for(proc.wait(), SOON_S) == 143
    assert proc.termination_reason == "timeout"


@pytest.mark.spec("C7")
async def test_a_limit_that_is_not_reached_changes_nothing(sbx: sb.Session) -> None:
    result = await sbx.exec("echo quick", timeout_s=2 * START)
    assert (result.stdout, result.termination_reason) == ("quick\n", "")
    await asyncio.sleep(2.1 * START)
    assert (await sbx.exec("echo more", timeout_s=1e9)).ok


@pytest.mark.spec("C7", "D2")
async def test_death_by_signal_n_is_128_plus_n(sbx: sb.Session) -> None:
    for name in ("TERM", "KILL", "INT", "HUP", "SEGV", "ABRT", "USR1", "PIPE"):
        result = await sbx.exec(["sh", "-c", f"kill -{name} $$"])
        assert result.returncode == 128 + getattr(signal, f"SIG{name}"), name
        assert result.termination_reason == "signal", name


@pytest.mark.spec("C7", "D2")
async def test_an_exit_is_an_exit_whatever_its_number(sbx: sb.Session) -> None:
    for code in (0, 1, 5, 127, 128, 137, 143, 255):
        result = await sbx.exec(f"exit {code}")
        assert (result.returncode, result.termination_reason) == (code, "")


@pytest.mark.spec("D3")
@pytest.mark.parametrize("act, number", [("kill", signal.SIGKILL), ("terminate", signal.SIGTERM)])
async def test_kill_and_terminate_act_on_the_tree(sbx: sb.Session, act: str, number: int) -> None:
    proc = await sbx.run("setsid sleep 60 & sleep 60 & echo up; exec sleep 60", stdout=True)
    assert await anext(proc.iter_stdout_lines()) == "up"
    began = time.monotonic()
    getattr(proc, act)()
    assert await proc.wait() == 128 + number
    assert time.monotonic() - began < SOON_S
    assert gone()
    assert proc.termination_reason == "signal"


@pytest.mark.spec("D3")
async def test_a_signal_reaches_every_process_of_the_tree(sbx: sb.Session) -> None:
    child = 'trap "echo child; exit" USR1; echo up; while :; do sleep 0.02; done'
    parent = "trap 'wait; echo parent; exit 7' USR1; sleep 0.1; echo up"
    text = f"setsid sh -c '{child}' & {parent}; while :; do sleep 0.02; done"
    proc = await sbx.run(text, stdout=True, stderr=True, timeout_s=5)
    lines = proc.iter_stdout_lines()
    assert [await anext(lines), await anext(lines)] == ["up", "up"]
    proc.send_signal(signal.SIGUSR1)
    assert [line async for line in lines] == ["child", "parent"]
    assert await proc.wait() == 7


async def drained(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        pass


@pytest.mark.spec("D3")
async def test_stop_and_continue(sbx: sb.Session) -> None:
    proc = await sbx.run("while :; do echo x; sleep 0.02; done", stdout=True)
    chunks = proc.iter_stdout()
    await anext(chunks)
    proc.send_signal(signal.SIGSTOP)
    await asyncio.sleep(0.1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(drained(chunks), 0.4)
    proc.send_signal(signal.SIGCONT)
    assert await asyncio.wait_for(anext(proc.iter_stdout()), SOON_S)
    proc.kill()
    assert await proc.wait() == 137


@pytest.mark.spec("D3")
async def test_signals_after_the_end_do_nothing(sbx: sb.Session) -> None:
    proc = await sbx.run("exit 3")
    proc.kill()
    proc.terminate()
    proc.send_signal(signal.SIGUSR1)
    assert (await proc.wait(), proc.termination_reason) == (3, "")


@pytest.mark.spec("C10", "D3", "D8")
async def test_a_signal_that_does_not_exist(sbx: sb.Session) -> None:
    proc = await sbx.run("sleep 60", stdout=True)
    for number in (-1, 10_000, "TERM", None):
        with pytest.raises(sb.SandboxUsageError) as caught:
            proc.send_signal(number)  # type: ignore[arg-type]
        assert repr(number) in str(caught.value)
    proc.kill()
    await proc.wait()


@pytest.mark.spec("D2", "G3")
async def test_out_of_memory_is_reported_as_such(open_session: OpenSession) -> None:
    async with open_session(resources=sb.Resources(memory="64Mi")) as session:
        assert dict(session.isolation.limits)["memory"] in {"cgroup-v2", "cgroup-v1", "watch"}
        hungry = """
            import time
            print("start", flush=True)
            held = []
            for _ in range(100):
                held.append(b"x" * (4 << 20))
                time.sleep(0.01)
            print("never")
        """
        result = await session.exec(hungry, script_type="python", timeout_s=20)
        assert (result.returncode, result.termination_reason) == (137, "oom"), result
        assert result.stdout == "start\n"
        assert (result.usage.peak_memory_bytes or 0) > 30 << 20
        modest = await session.exec("x = bytearray(16 << 20); print('fits')", script_type="python")
        assert (modest.stdout, modest.termination_reason) == ("fits\n", "")


@pytest.mark.spec("D2", "G3")
async def test_memory_is_that_of_the_tree(open_session: OpenSession) -> None:
    one = "import time; x = b'x' * (30 << 20); print('held', flush=True); time.sleep(4)"
    async with open_session(resources=sb.Resources(memory="96Mi")) as session:
        result = await session.exec(
            f'for i in 1 2 3 4 5; do python -c "{one}" & done; wait', timeout_s=20
        )
        # The kernel may choose a child, and then the shell goes on: what counts is that five times
        # 30 MiB were never held.
        assert result.termination_reason == "oom" or result.stdout.count("held") < 5
        assert gone()


@pytest.mark.spec("D2", "G3")
async def test_a_file_that_grows_too_large_is_a_limit(open_session: OpenSession) -> None:
    async with open_session(resources=sb.Resources(file_size="1Mi")) as session:
        result = await session.exec(["head", "-c", "5000000", "/dev/zero"])
        assert result.ok, "a pipe is not a file"
        result = await session.exec("exec head -c 5000000 /dev/zero > big")
        assert (result.returncode, result.termination_reason) == (128 + signal.SIGXFSZ, "limit")
        assert len(await session.get_bytes("big")) == 1 << 20


@pytest.mark.spec("G3")
async def test_the_number_of_processes_is_limited(jail: sb.Session) -> None:
    code = """
        import os, sys, time
        made = 0
        try:
            for _ in range(1000):
                if os.fork() == 0:
                    time.sleep(30)
                    os._exit(0)
                made += 1
        except OSError as exc:
            print(type(exc).__name__)
        print(made)
    """
    kind, made = (await jail.run_code(code)).split()
    assert kind == "BlockingIOError"
    assert sb.constants.DEFAULT_PROCESSES - 20 <= int(made) <= sb.constants.DEFAULT_PROCESSES
    assert gone()
    assert (await jail.exec("echo usable")).stdout == "usable\n"


@pytest.mark.spec("G3")
async def test_open_files_are_limited(open_session: OpenSession) -> None:
    async with open_session(resources=sb.Resources(open_files=64)) as session:
        assert (await session.exec("ulimit -n")).stdout == "64\n"
    async with open_session() as session:
        assert int((await session.exec("ulimit -n")).stdout) <= sb.constants.DEFAULT_OPEN_FILES
        assert (await session.exec("ulimit -c")).stdout == "0\n"

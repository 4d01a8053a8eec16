"""Results of commands that ended, and errors of commands that did not."""

from __future__ import annotations

import asyncio
import pickle

import pytest
from tests.conftest import SOON_S

from union import sandbox as sb


@pytest.mark.spec("D2")
async def test_a_running_process_and_a_finished_one(sbx: sb.Session) -> None:
    proc = await sbx.run("read x; exit 5", stdin=sb.PIPE, stdout=True)
    assert proc.returncode is None
    assert proc.exit_code is None
    assert proc.termination_reason == ""
    assert isinstance(proc.pid, int)
    assert proc.pid > 1
    assert "running" in repr(proc)
    first = proc.runtime_ms
    await asyncio.sleep(0.05)
    assert proc.runtime_ms >= first + 40
    assert proc.stdin is not None
    proc.stdin.close()
    assert await proc.wait() == 5
    assert (proc.returncode, proc.exit_code, proc.termination_reason) == (5, 5, "")
    last = proc.runtime_ms
    await asyncio.sleep(0.02)
    assert proc.runtime_ms == last
    assert proc.backend == sbx.backend
    assert "5" in repr(proc)


@pytest.mark.spec("D2")
async def test_the_pid_is_the_one_inside(sbx: sb.Session) -> None:
    proc = await sbx.run("echo $$", stdout=True)
    assert (await proc.communicate())[0] == f"{proc.pid}\n".encode()


@pytest.mark.spec("D2")
async def test_network_decisions_are_a_part_of_the_process(sbx: sb.Session) -> None:
    proc = await sbx.run("true")
    assert hasattr(proc, "network")


@pytest.mark.spec("D2")
async def test_runtime_is_wall_clock(sbx: sb.Session) -> None:
    proc = await sbx.run("sleep 0.3")
    assert 290 < proc.runtime_ms < SOON_S * 1000


@pytest.mark.spec("D2")
async def test_usage_counts_the_command_with_its_children(sbx: sb.Session) -> None:
    idle = (await sbx.run("sleep 0.3")).usage
    burn = (
        "import time; end = time.process_time() + 0.3; x = b'x' * (60 << 20)\n"
        "while time.process_time() < end: pass"
    )
    busy = (await sbx.run(burn, script_type="python")).usage
    child = (await sbx.run(f'python -c "{burn}"; true')).usage
    assert idle.cpu_s < 0.15
    for found in (busy, child):
        assert 0.3 <= found.cpu_s < 3
        assert found.max_rss_bytes > 60 << 20
        assert found.cpu_s == found.cpu_user_s + found.cpu_system_s
    assert idle.max_rss_bytes < 40 << 20


@pytest.mark.spec("D4")
@pytest.mark.parametrize("code", [1, 2, 126, 127, 255])
async def test_a_non_zero_exit_never_raises(sbx: sb.Session, code: int) -> None:
    proc = await sbx.run(f"exit {code}", stdout=True)
    assert await proc.communicate() == (b"", b"")
    assert await proc.wait() == code
    assert (await sbx.run(f"exit {code}")).returncode == code
    assert not (await sbx.exec(f"exit {code}")).ok


@pytest.mark.spec("D5")
async def test_exec_gives_a_result(sbx: sb.Session) -> None:
    result = await sbx.exec("echo žluť; echo err >&2; exit 4")
    assert isinstance(result, sb.ExecResult)
    assert (result.returncode, result.exit_code, result.ok) == (4, 4, False)
    assert (result.stdout, result.stderr) == ("žluť\n", "err\n")
    assert (result.truncated, result.termination_reason) == (False, "")
    assert result.backend == sbx.backend
    assert result.runtime_ms > 0
    assert (await sbx.exec("true", check=True)).ok


@pytest.mark.spec("D5")
@pytest.mark.parametrize("cmd", ["echo partial; echo why >&2; exit 3", ["sh", "-c", "exit 3"]])
async def test_check_raises_with_command_and_result(sbx: sb.Session, cmd: object) -> None:
    with pytest.raises(sb.SandboxCommandError) as caught:
        await sbx.exec(cmd, check=True)  # type: ignore[arg-type]
    assert caught.value.cmd == cmd
    assert caught.value.result.returncode == 3
    assert caught.value.result.stderr.strip() in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.cmd, again.result, str(again)) == (cmd, caught.value.result, str(caught.value))


@pytest.mark.spec("D5")
async def test_run_code_returns_stdout_or_raises(sbx: sb.Session) -> None:
    assert await sbx.run_code("print(2 + 2)") == "4\n"
    with pytest.raises(sb.SandboxCommandError, match="ZeroDivisionError") as caught:
        await sbx.run_code("print('before')\n1 / 0")
    assert caught.value.result.stdout == "before\n"
    assert caught.value.code == "command"


@pytest.mark.spec("D5")
async def test_both_take_the_arguments_of_run(sbx: sb.Session) -> None:
    await sbx.put_bytes("sub/f", b"here")
    options = {"env": {"A": "b"}, "cwd": "sub", "timeout_s": 10, "network_mode": "blocked"}
    shown = await sbx.exec("echo $A; cat f", **options)  # type: ignore[arg-type]
    assert shown.stdout == "b\nhere"
    code = "import os; print(os.environ['A'], open('f').read())"
    assert await sbx.run_code(code, **options) == "b here\n"
    assert await sbx.run_code("print(input())", stdin=b"typed\n") == "typed\n"


STREAMS = {
    "collected": {},
    "stdout piped": {"stdout": True},
    "both piped": {"stdout": True, "stderr": True},
    "background": {"background": True},
}


@pytest.mark.spec("D4", "R5")
@pytest.mark.parametrize("streams", STREAMS)
async def test_a_program_that_is_not_there(sbx: sb.Session, streams: str) -> None:
    proc = await sbx.run(["no-such-program", "x"], **STREAMS[streams])
    out, err = await proc.communicate()
    assert (out, err) == (b"", b"no-such-program: not found in the sandbox\n")
    assert (await proc.wait(), proc.returncode, proc.termination_reason) == (127, 127, "")
    assert proc.pid is not None
    assert (await sbx.exec("echo usable")).stdout == "usable\n"


@pytest.mark.spec("D4", "R5")
async def test_the_message_of_a_missing_program_follows_the_streams(sbx: sb.Session) -> None:
    merged = await sbx.run(["no-such-program"], stderr=sb.STDOUT)
    assert merged.result().stdout == "no-such-program: not found in the sandbox\n"
    discarded = await sbx.run(["no-such-program"], stdout=False, stderr=False)
    assert (discarded.returncode, await discarded.communicate()) == (127, (b"", b""))
    piped = await sbx.run(["no-such-program"], stdin=sb.PIPE, stdout=True, stderr=True)
    assert [line async for line in piped.iter_stderr_lines()] == [
        "no-such-program: not found in the sandbox"
    ]
    assert await piped.wait() == 127


@pytest.mark.spec("D5", "R5")
async def test_check_raises_for_a_missing_program(sbx: sb.Session) -> None:
    with pytest.raises(sb.SandboxCommandError) as caught:
        await sbx.exec(["no-such-program", "x"], check=True)
    assert caught.value.result.returncode == 127


@pytest.mark.spec("D4", "R5")
@pytest.mark.parametrize("program", ["./data", "./dir", "./text"])
async def test_a_program_that_cannot_be_executed(sbx: sb.Session, program: str) -> None:
    await sbx.put_bytes("data", b"\x7fnothing", mode=0o755)
    await sbx.put_bytes("dir/f", b"")
    await sbx.put_bytes("text", b"echo hi", mode=0o644)
    result = await sbx.exec([program])
    assert result.returncode == 126
    assert result.stderr.startswith(f"{program}: ")
    assert result.stderr.endswith("\n")


@pytest.mark.spec("R5")
async def test_the_shell_reports_both_in_the_same_way(sbx: sb.Session) -> None:
    await sbx.put_bytes("text", b"echo hi", mode=0o644)
    for cmd, code in (("no-such-program x", 127), ("./text", 126), ("./missing", 127)):
        result = await sbx.exec(cmd)
        assert (result.returncode, result.stdout) == (code, "")
        assert result.stderr.endswith("\n")
        assert cmd.split()[0] in result.stderr


@pytest.mark.spec("R5")
async def test_a_script_without_its_interpreter_is_not_found(sbx: sb.Session) -> None:
    await sbx.put_bytes("script", b"#!/no/such/interpreter\n", mode=0o755)
    result = await sbx.exec(["./script"])
    assert (result.returncode, "interpreter is missing" in result.stderr) == (127, True)


ORDER = "for i in 1 2 3 4 5; do echo o$i; echo e$i >&2; done"
IN_ORDER = [f"{stream}{n}" for n in range(1, 6) for stream in "oe"]


@pytest.mark.spec("R5", "C2")
async def test_stderr_merges_into_stdout_in_order(sbx: sb.Session) -> None:
    collected = await sbx.run(ORDER, stderr=sb.STDOUT)
    assert collected.result().stdout.split() == IN_ORDER
    assert collected.result().stderr == ""
    piped = await sbx.run(ORDER, stdout=True, stderr=sb.STDOUT)
    assert [line async for line in piped.iter_stdout_lines()] == IN_ORDER
    with pytest.raises(sb.SandboxUsageError, match="merged"):
        await anext(piped.iter_stderr_lines())
    both = await sbx.run(ORDER, stdout=True, stderr=sb.STDOUT)
    assert await both.communicate() == ("\n".join([*IN_ORDER, ""]).encode(), b"")


@pytest.mark.spec("R5", "C2")
async def test_python_merges_too_and_discards_both(sbx: sb.Session) -> None:
    code = "import os\nfor n in range(3): os.write(1, b'o\\n'); os.write(2, b'e\\n')"
    for _ in range(3):  # also where a Python waits
        proc = await sbx.run(code, script_type="python", stderr=sb.STDOUT)
        assert proc.result().stdout == "o\ne\n" * 3
        silent = await sbx.run(code, script_type="python", stdout=False, stderr=sb.STDOUT)
        assert (silent.returncode, silent.result().stdout) == (0, "")
        half = await sbx.run(code, script_type="python", stderr=False)
        assert (half.result().stdout, half.result().stderr) == ("o\n" * 3, "")
        await sbx.run_code("pass")


@pytest.mark.spec("R5", "C10")
@pytest.mark.parametrize("argument", ["stdout", "stdin"])
async def test_only_stderr_merges(sbx: sb.Session, argument: str) -> None:
    with pytest.raises(sb.SandboxUsageError, match=argument):
        await sbx.run("true", **{argument: sb.STDOUT})


@pytest.mark.spec("D4")
async def test_a_shell_that_finds_nothing_is_an_exit(sbx: sb.Session) -> None:
    result = await sbx.exec("no-such-program")
    assert result.returncode == 127
    assert "not found" in result.stderr


@pytest.mark.spec("D4", "D8")
async def test_arguments_larger_than_the_kernel_takes(sbx: sb.Session) -> None:
    with pytest.raises(sb.SandboxError) as caught:
        await sbx.exec(["true", *["x" * 100_000] * 100])
    assert caught.value.hint
    assert (await sbx.exec(["true", *["x" * 100_000] * 10])).ok


@pytest.mark.spec("D8")
async def test_every_error_is_ours(sbx: sb.Session) -> None:
    for call in (
        sbx.exec("false", check=True),
        sbx.run_code("raise SystemExit(2)"),
        sbx.exec(""),
        sbx.exec("true", cwd="missing"),
        sbx.exec(["missing"], check=True),
        sbx.get_bytes("missing"),
        sbx.put_bytes("/etc/x", b""),
    ):
        with pytest.raises(sb.SandboxError) as caught:
            await call
        assert caught.value.code
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.code) == (
            type(caught.value), str(caught.value), caught.value.code,
        )  # fmt: skip


@pytest.mark.spec("D7")
async def test_results_pickle(sbx: sb.Session) -> None:
    result = await sbx.exec("echo x")
    assert pickle.loads(pickle.dumps(result)) == result
    assert pickle.loads(pickle.dumps(sbx.isolation)) == sbx.isolation

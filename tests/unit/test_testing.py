"""The scripted session: what users' own tests stand on behaves like the real thing."""

from __future__ import annotations

import asyncio
import re
import signal

import pytest

from union import sandbox as sb
from union.sandbox.testing import Answer, Call, ScriptedTransport, scripted_session


async def test_text_is_stdout_and_a_number_is_an_exit_code():
    async with scripted_session({"ls": "a\nb\n", "false": 1, "raw": b"\xff"}) as sbx:
        assert (await sbx.exec("ls")).stdout == "a\nb\n"
        assert (await sbx.exec("false")).returncode == 1
        proc = await sbx.run("raw", stdout=True)
        assert await proc.communicate() == (b"\xff", b"")
        assert (proc.backend, proc.pid, proc.returncode) == ("scripted", 2, 0)


async def test_an_answer_says_everything():
    answer = Answer(stdout="o", stderr="e", returncode=137, termination_reason="oom")
    async with scripted_session({"x": answer}) as sbx:
        result = await sbx.exec("x")
    assert (result.stdout, result.stderr, result.returncode) == ("o", "e", 137)
    assert result.termination_reason == "oom"


async def test_a_pattern_is_searched_and_the_whole_command_wins():
    answers = {re.compile("install"): "some", "uv pip install x": "exact"}
    async with scripted_session(answers) as sbx:
        assert (await sbx.exec("uv pip install x")).stdout == "exact"
        assert (await sbx.exec("uv pip install y")).stdout == "some"


async def test_an_argv_is_matched_as_a_shell_would_quote_it():
    transport = ScriptedTransport({"echo 'a b'": "ok"})
    async with scripted_session(transport) as sbx:
        assert (await sbx.exec(["echo", "a b"])).stdout == "ok"
    assert transport.commands == [("echo", "a b")]


async def test_a_command_without_an_answer_is_an_error_that_lists_the_script():
    async with scripted_session({"ls": "", re.compile("^uv "): ""}) as sbx:
        with pytest.raises(sb.SandboxUsageError, match="'rm -rf x'") as caught:
            await sbx.run("rm -rf x")
    assert caught.value.code == "unscripted"
    assert "'ls', '^uv '" in caught.value.hint


async def test_calls_are_recorded_with_what_was_asked():
    transport = ScriptedTransport(lambda _: 0)
    async with scripted_session(transport, env={"A": "1"}) as sbx:
        await sbx.run("one", env={"B": "2"}, cwd="sub", stdin=b"in", timeout_s=9)
        await sbx.run("\n    two\n", script_type="python", network_mode="open")
    first, second = transport.calls
    assert first == Call(
        cmd="one",
        script_type="shell",
        env={"A": "1", "B": "2"},
        cwd="sub",
        stdin=b"in",
        network_mode="blocked",
        timeout_s=9.0,
        background=False,
        files={},
    )
    assert (second.cmd, second.script_type, second.network_mode) == ("\ntwo\n", "python", "open")


async def test_a_callable_sees_the_call_and_may_write_files():
    def work(call: Call) -> str:
        call.files["out.txt"] = call.files["in.txt"].upper()
        return f"{call.cmd} done"

    transport = ScriptedTransport({"work": work}, files={"in.txt": b"abc"})
    async with scripted_session(transport) as sbx:
        assert (await sbx.exec("work")).stdout == "work done"
        assert await sbx.get_bytes("out.txt") == b"ABC"
    assert transport.files["out.txt"] == b"ABC"


async def test_a_callable_gets_all_of_a_piped_stdin():
    async with scripted_session({"cat": lambda call: call.stdin}) as sbx:
        proc = await sbx.run("cat", stdin=sb.PIPE, stdout=sb.PIPE)
        assert proc.stdin is not None
        proc.stdin.write(b"one ")
        await proc.stdin.drain()
        assert await proc.communicate(b"two") == (b"one two", b"")


async def test_exceptions_of_a_callable_reply_propagate():
    def broken(_: Call) -> str:
        raise LookupError("mistake in the test")

    async with scripted_session({"x": broken}) as sbx:
        with pytest.raises(LookupError, match="mistake in the test"):
            await sbx.run("x")


async def test_a_command_that_never_started():
    async with scripted_session({"x": Answer(failure="no such program")}) as sbx:
        proc = await sbx.run("x")
        with pytest.raises(sb.SandboxExecutionError, match="no such program") as caught:
            await proc.wait()
    assert (proc.returncode, caught.value.returncode, caught.value.stage) == (None, -1, "spawn")


async def test_a_checked_failure_raises_as_usual():
    async with scripted_session({"raise E": Answer(stderr="E: bad", returncode=1)}) as sbx:
        with pytest.raises(sb.SandboxCommandError, match="E: bad"):
            await sbx.run_code("raise E")


async def test_a_time_limit_passes_and_output_is_kept():
    async with scripted_session({"slow": Answer(stdout="so far", after_s=60)}) as sbx:
        result = await sbx.exec("slow", timeout_s=0.05)
    assert (result.returncode, result.termination_reason) == (143, "timeout")
    assert result.stdout == "so far"


async def test_the_sessions_time_limit_closes_it():
    async with scripted_session({"slow": Answer(after_s=60)}, timeout_s=0.05) as sbx:
        assert (await sbx.exec("slow")).termination_reason == "timeout"
        with pytest.raises(sb.SessionClosedError, match=r"timeout_s=0\.05 has passed"):
            await sbx.exec("slow")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it(signum: int):
    async with scripted_session({"slow": Answer(after_s=60)}) as sbx:
        proc = await sbx.run("slow", background=True)
        proc.send_signal(signal.SIGCONT)
        assert proc.returncode is None
        proc.send_signal(signum)
        assert await proc.wait() == 128 + signum
        assert proc.termination_reason == "signal"


async def test_close_ends_what_is_running():
    async with scripted_session({"slow": Answer(after_s=60)}) as sbx:
        proc = await sbx.run("slow", background=True)
    assert await proc.wait() == 137
    assert proc.termination_reason == "closed"
    with pytest.raises(sb.SessionClosedError):
        await sbx.exec("slow")


async def test_cancelling_ends_the_command():
    transport = ScriptedTransport({"slow": Answer(after_s=60)})
    async with scripted_session(transport) as sbx:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sbx.exec("slow"), 0.05)
        await asyncio.sleep(0)  # on Python 3.12, wait_for() returns before callbacks run
        assert not transport._runs


async def test_a_large_output_waits_for_its_reader():
    big = b"x" * (5 * 1024 * 1024)
    async with scripted_session({"big": Answer(stdout=big, stderr=big)}) as sbx:
        proc = await sbx.run("big", stdout=True, stderr=True)
        await asyncio.sleep(0.02)
        assert proc.returncode is None, "without a reader the writer must wait"
        out = b"".join([chunk async for chunk in proc.iter_stdout()])
        err = b"".join([chunk async for chunk in proc.iter_stderr()])
    assert (out, err, proc.returncode) == (big, big, 0)


async def test_discarded_streams_are_not_written():
    async with scripted_session({"x": Answer(stdout="o", stderr="e")}) as sbx:
        proc = await sbx.run("x", stdout=False, stderr=True)
        assert await proc.communicate() == (b"", b"e")


async def test_files_follow_the_rules_of_a_work_dir():
    async with scripted_session({}) as sbx:
        assert await sbx.put_bytes("a/b.txt", b"12") == 2
        assert await sbx.get_bytes(f"{sbx.work_dir}/a/b.txt") == b"12"
        with pytest.raises(FileNotFoundError):
            await sbx.get_bytes("nothing")
        with pytest.raises(IsADirectoryError):
            await sbx.get_bytes("a")
        with pytest.raises(IsADirectoryError):
            await sbx.put_bytes("a", b"")
        with pytest.raises(NotADirectoryError):
            await sbx.put_bytes("a/b.txt/c", b"")
        with pytest.raises(FileExistsError):
            await sbx.put_bytes("a/b.txt", b"", overwrite=False)
        with pytest.raises(PermissionError):
            await sbx.get_bytes("/etc/passwd")
        with pytest.raises(OSError, match="max_bytes is 1"):
            await sbx.get_bytes("a/b.txt", max_bytes=1)
        with pytest.raises(sb.SandboxUsageError, match="data must be bytes"):
            await sbx.put_bytes("c", "text")
        with pytest.raises(sb.SandboxUsageError, match="mode must be"):
            await sbx.put_bytes("c", b"", mode=0o4755)


async def test_a_terminal_has_one_output_and_a_window():
    transport = ScriptedTransport({"top": Answer(stdout="a", stderr="b", after_s=60)})
    async with scripted_session(transport) as sbx:
        proc = await sbx.run("top", pty=(10, 20), stdout=True)
        assert await anext(proc.iter_stdout()) == b"ab"
        proc.resize(30, 40)
    assert [call.pty for call in transport.calls] == [(10, 20)]
    assert transport.resizes == [(30, 40)]


async def test_arguments_are_checked_as_with_a_sandbox():
    async with scripted_session({"x": 0}) as sbx:
        with pytest.raises(sb.SandboxUsageError, match="timeout_s"):
            await sbx.run("x", timeout_s=-1)
    with pytest.raises(sb.PolicyError):
        scripted_session({}, network_mode="blocked", network_allowlist=["example.com"])
    with pytest.raises(sb.SandboxUsageError, match="files"):
        scripted_session(ScriptedTransport({}), files={})


@pytest.mark.parametrize("reply", [True, None, 1.5, ["x"]])
async def test_a_senseless_answer_is_refused(reply: object):
    async with scripted_session({"x": reply}) as sbx:  # type: ignore[dict-item]  # the point
        with pytest.raises(sb.SandboxUsageError, match="a scripted reply must be"):
            await sbx.run("x")


async def test_it_says_that_it_isolates_nothing():
    async with scripted_session({}) as sbx:
        assert (sbx.backend, sbx.isolation.namespaces) == ("scripted", ())
        assert sbx.fs_allowlist() == {"read_only": (), "read_write": (sbx.work_dir,)}

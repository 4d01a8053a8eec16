"""A command with a terminal of its own: over every way."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest
from tests.conftest import START, OpenSession, descriptors

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Screen:
    """Reads what a terminal shows until a text comes, and types."""

    def __init__(self, proc: sb.SandboxProcess) -> None:
        self.proc = proc
        self._chunks: AsyncIterator[bytes] = proc.iter_stdout()
        self._unread = ""

    async def until(self, text: str) -> str:
        """Everything up to and with ``text``, which must come soon."""
        try:
            async with asyncio.timeout(40):
                while text not in self._unread:
                    self._unread += (await anext(self._chunks)).decode()
        except TimeoutError:
            pytest.fail(f"{text!r} did not come: {self._unread!r}")
        shown, _, self._unread = self._unread.partition(text)
        return shown + text

    async def cat(self) -> None:
        """Has a shell run ``cat``, and waits until that surely reads."""
        await self.until(" ")  # of its prompt
        self.type("cat\n")
        await self.until("cat\r\n")
        self.type("read\n")
        await self.until("read\r\nread\r\n")

    async def prompt(self) -> None:
        """Waits for a shell that has something to say first; what is typed before may be lost."""
        await self.until("\r\n")
        await self.until(" ")

    def type(self, text: str) -> None:
        assert self.proc.stdin is not None
        self.proc.stdin.write(text.encode())


async def shown(sbx: sb.Session, cmd: str, **options: object) -> str:
    """Return the terminal output of a command that ran to its end."""
    proc = await sbx.run(cmd, pty=options.pop("pty", True), timeout_s=15, **options)  # type: ignore[arg-type]
    out, err = await proc.communicate_text()
    assert err == ""
    await asyncio.sleep(0)  # the waiter is woken first, then the session closes
    return out.replace("\r\n", "\n")


async def test_all_three_streams_are_the_terminal(sbx: sb.Session) -> None:
    text = await shown(
        sbx, "test -t 0 && test -t 1 && test -t 2 && echo all; echo err >&2; echo $TERM"
    )
    assert text == "all\nerr\nxterm-256color\n"


async def test_the_terminal_has_a_name_and_can_be_opened_by_it(sbx: sb.Session) -> None:
    text = await shown(sbx, 'echo by name > "$(tty)"; echo controlling > /dev/tty')
    if sbx.isolation.proc == "hidden":  # nor are the terminals of the host visible
        assert "Permission denied" in text
        assert text.endswith("\ncontrolling\n")
    else:
        assert text == "by name\ncontrolling\n"


@pytest.mark.parametrize("pty, size", [(True, "24 80"), ((7, 300), "7 300")])
async def test_the_window_is_known_from_the_start(sbx: sb.Session, pty: object, size: str) -> None:
    assert await shown(sbx, "stty size", pty=pty) == f"{size}\n"


async def test_python_sees_a_terminal_and_its_own_session(sbx: sb.Session) -> None:
    code = """
        import os, sys
        print(sys.stdin.isatty(), os.get_terminal_size(), os.tcgetpgrp(0) == os.getpgid(0))
        print(os.getsid(0) == os.getpid())
    """
    out = await shown(sbx, code, script_type="python")
    assert out.splitlines() == ["True os.terminal_size(columns=80, lines=24) True", "True"]


async def test_a_resize_is_signalled_and_seen(sbx: sb.Session) -> None:
    code = """
        import os, signal
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])
        print("ready", flush=True)
        signal.sigwait([signal.SIGWINCH])
        print(*os.get_terminal_size(0))
    """
    proc = await sbx.run(code, script_type="python", pty=True, stdout=True, timeout_s=15)
    screen = Screen(proc)
    await screen.until("ready")
    proc.resize(50, 132)
    await screen.until("132 50")
    assert await proc.wait() == 0
    proc.resize(10, 10)  # after the end: nothing to do, no error


async def test_typed_input_is_read_and_echoed(sbx: sb.Session) -> None:
    proc = await sbx.run("read a; echo got $a", pty=True, stdin=True, stdout=True)
    screen = Screen(proc)
    screen.type("hello\n")
    assert await screen.until("got hello") == "hello\r\ngot hello"
    assert await proc.wait() == 0


@pytest.mark.parametrize(
    "data, out", [(b"one\ntwo\n", "one\ntwo\none\ntwo\n"), (b"half", "halfhalf"), (b"", "")]
)
async def test_given_input_is_typed_and_then_ends(sbx: sb.Session, data: bytes, out: str) -> None:
    assert await shown(sbx, "sleep 0.1; cat", stdin=data) == out


async def test_without_stdin_the_input_is_at_its_end(sbx: sb.Session) -> None:
    assert await shown(sbx, "cat; echo end") == "end\n"


async def test_closing_stdin_types_the_end_of_file(sbx: sb.Session) -> None:
    proc = await sbx.run("cat; echo end", pty=True, stdin=True, stdout=True, timeout_s=15)
    assert (await proc.communicate(b"x\n"))[0].split() == [b"x", b"x", b"end"]
    assert proc.returncode == 0


async def test_ctrl_c_interrupts_the_foreground_job_alone(sbx: sb.Session) -> None:
    proc = await sbx.run(["sh", "-i"], pty=True, stdin=True, stdout=True, timeout_s=20)
    screen = Screen(proc)
    await screen.cat()
    screen.type("\x03")
    await screen.until("^C")
    await screen.prompt()
    screen.type("echo status $?\n")
    await screen.until("status 130")
    screen.type("exit 7\n")
    assert await proc.wait() == 7


async def test_job_control_stops_and_continues(sbx: sb.Session) -> None:
    proc = await sbx.run(["sh", "-i"], pty=True, stdin=True, stdout=True, timeout_s=20)
    screen = Screen(proc)
    await screen.cat()
    screen.type("\x1a")
    await screen.until("Stopped")
    await screen.prompt()
    screen.type("fg\n")
    await screen.until("cat\r\n")
    screen.type("again\n")
    await screen.until("again\r\nagain\r\n")
    screen.type("\x04")
    await screen.until(" ")
    screen.type("\x04")
    assert await proc.wait() == 0


async def test_ctrl_z_does_not_stop_a_command_without_job_control(sbx: sb.Session) -> None:
    proc = await sbx.run("echo begun; read x; echo $x", pty=True, stdin=True, stdout=True)
    screen = Screen(proc)
    await screen.until("begun")
    screen.type("\x1aon\n")
    await screen.until("on\r\non")
    assert await proc.wait() == 0


async def test_no_output_is_lost_at_the_end(sbx: sb.Session) -> None:
    text = await shown(sbx, "sleep 100 & seq 1 50000")
    assert text.splitlines() == [str(n) for n in range(1, 50001)]


async def test_a_terminal_that_is_closed_and_opened_again_goes_on(sbx: sb.Session) -> None:
    cmd = "exec 3>&1 </dev/null >/dev/null 2>&1 3>&-; sleep 0.2; echo back > /dev/tty; exit 4"
    proc = await sbx.run(cmd, pty=True, timeout_s=15)
    assert await proc.communicate() == (b"back\r\n", b"")
    assert proc.returncode == 4


async def test_a_writer_is_slowed_by_a_reader_that_does_not_read(sbx: sb.Session) -> None:
    proc = await sbx.run("yes", pty=True, stdout=True)
    await anext(proc.iter_stdout())
    await asyncio.sleep(0.2)
    assert proc.returncode is None
    proc.kill()
    assert await proc.wait() == 128 + signal.SIGKILL


async def test_a_time_limit_ends_an_interactive_shell(sbx: sb.Session) -> None:
    # The shell ignores SIGTERM once it is up.
    limit_s = 0.5 * START
    proc = await sbx.run(["sh", "-i"], pty=True, stdin=True, stdout=True, timeout_s=limit_s)
    assert await proc.wait() == 128 + signal.SIGKILL
    assert proc.termination_reason == "timeout"


@pytest.mark.spec("R5")
async def test_a_missing_program_is_an_exit_as_ever(sbx: sb.Session) -> None:
    proc = await sbx.run(["no-such-program"], pty=True, stdout=True)
    assert await proc.communicate() == (b"no-such-program: not found in the sandbox\r\n", b"")
    assert await proc.wait() == 127


async def test_no_descriptor_is_left(open_session: OpenSession) -> None:
    async with open_session(warm=False) as sbx:
        await shown(sbx, "true")
        before = descriptors()
        for stdin in (None, b"x", True):
            proc = await sbx.run("true", pty=True, stdin=stdin, stdout=True)
            await proc.communicate()
        missing = await sbx.run(["/nothing/here"], pty=True, stdout=True)
        await missing.communicate()
        assert missing.returncode == 127
        await asyncio.sleep(0)
        assert descriptors() == before


async def test_leaving_the_session_ends_a_shell_at_its_terminal(sbx: sb.Session) -> None:
    proc = await sbx.run(["sh", "-i"], pty=True, stdin=True, stdout=True, background=True)
    await sbx.close()
    assert proc.termination_reason == "closed"


async def test_without_pty_there_is_no_terminal(sbx: sb.Session) -> None:
    assert await shown(sbx, "tty") != "not a tty\n"
    assert (await sbx.exec("tty")).stdout == "not a tty\n"
    proc = await sbx.run("true", stdout=True)
    with pytest.raises(sb.SandboxUsageError, match="pty=True"):
        proc.resize(1, 1)
    await proc.wait()


@pytest.mark.parametrize(
    "options, argument",
    [
        ({"pty": "yes"}, "pty"),
        ({"pty": 24}, "pty"),
        ({"pty": (24,)}, "pty"),
        ({"pty": (0, 80)}, "pty"),
        ({"pty": (24, 65536)}, "pty"),
        ({"pty": (24, True)}, "pty"),
        ({"pty": True, "stderr": True}, "stderr"),
        ({"pty": True, "stdout": sb.DEVNULL}, "stdout"),
    ],
)
@pytest.mark.spec("C10")
async def test_contradictory_arguments_are_rejected(
    sbx: sb.Session, options: dict[str, object], argument: str
) -> None:
    with pytest.raises(sb.SandboxUsageError) as caught:
        await sbx.run("true", **options)  # type: ignore[arg-type]  # the point
    assert caught.value.argument == argument


async def test_a_window_without_size_is_refused(sbx: sb.Session) -> None:
    proc = await sbx.run("cat", pty=True, stdin=True)
    with pytest.raises(sb.SandboxUsageError, match="rows and columns"):
        proc.resize(0, 80)
    proc.kill()
    await proc.wait()


async def test_output_can_be_passed_on(sbx: sb.Session, capfd: pytest.CaptureFixture[str]) -> None:
    proc = await sbx.run("echo seen; test -t 1 && echo terminal", pty=True, stdout=sb.INHERIT)
    assert proc.returncode == 0
    assert capfd.readouterr().out == "seen\r\nterminal\r\n"
    assert os.isatty(1) is False

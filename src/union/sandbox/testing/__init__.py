r"""Scripted sessions for tests of programs that use sandboxes. No command is executed.

``ScriptedTransport`` replies to commands from a script, keeps files in memory and records every
call. The session on top of it is the real one: arguments are checked, output is streamed, timeouts
expire and errors are raised as with a sandbox.

>>> import asyncio
>>> async def main():
...     async with scripted_session({"ls": "a.csv\n", "make": Answer(returncode=2)}) as sbx:
...         return (await sbx.exec("ls")).stdout, (await sbx.exec("make")).returncode
>>> asyncio.run(main())
('a.csv\n', 2)
"""

from __future__ import annotations

import asyncio
import re
import shlex
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from union.sandbox._core.events import Exited, Failed, Started, Usage
from union.sandbox._core.isolation import Isolation
from union.sandbox._core.resolve import resolve_session
from union.sandbox._session.lifecycle import SingleUseLifecycle
from union.sandbox._session.session import Session
from union.sandbox.errors import SandboxUsageError
from union.sandbox.testing._memory_files import MemoryFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._core.spec import RunSpec
    from union.sandbox._policy.http_entries import Http
    from union.sandbox._session.transport import Sink

__all__ = ["Answer", "Answers", "Call", "Reply", "ScriptedTransport", "scripted_session"]

_WORK_DIR: Final = "/sandbox/work"
_BACKEND: Final = "scripted"
_SHELL: Final = "/bin/sh"
_CHUNK_BYTES: Final = 64 * 1024

_ENDING_SIGNALS: Final = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGKILL, signal.SIGTERM}
)
"""Signals that end a program without handlers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The behaviour of one scripted command."""

    stdout: str | bytes = b""
    """Written when the command starts."""
    stderr: str | bytes = b""
    """Written when the command starts."""
    returncode: int = 0
    """The exit code."""
    termination_reason: str = ""
    """As ``ExecResult.termination_reason``."""
    after_s: float = 0.0
    """Seconds until the command ends; 0 (default) for at once."""
    failure: str = ""
    """If not empty, the command does not start: ``SandboxExecutionError`` with this reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One command that the session requested."""

    cmd: str | tuple[str, ...]
    """Shell text, Python source (dedented), or an argument list."""
    script_type: str
    """``shell``, ``python`` or ``argv``."""
    env: dict[str, str]
    """The variables of the session and the call together."""
    cwd: str | None
    """The working directory; None for the work dir."""
    stdin: bytes
    """The complete input; with ``stdin=PIPE``, everything written until it was closed."""
    network_mode: str
    """``blocked``, ``allowlist`` or ``open``."""
    timeout_s: float | None
    """The timeout of the call in seconds; None for none."""
    background: bool
    """Whether the call returns when the command has started."""
    pty: tuple[int, int] | None = None
    """Rows and columns of the terminal at the start; None for no terminal."""
    files: dict[str, bytes]
    """The session's files by path below the work dir; a reply may change them."""


Reply = str | bytes | int | Answer | Callable[["Call"], "str | bytes | int | Answer"]
"""Text is stdout, a number is an exit code, a callable is called when the command runs."""
Answers = (
    Mapping[str, Reply]
    | Mapping[re.Pattern[str], Reply]
    | Mapping[str | re.Pattern[str], Reply]
    | Callable[[Call], "str | bytes | int | Answer"]
)
"""Replies by command: a str matches the whole command, a pattern is searched in it."""


class ScriptedTransport(MemoryFiles):
    """Transport that replies to commands from a script.

    Args:
        answers: replies by command, or a callable that returns the reply to a `Call`.
        files: initial content by path below the work dir; None (default) for none.

    """

    def __init__(self, answers: Answers, *, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(_WORK_DIR, files)
        self._answers = answers
        self._runs: set[_ScriptedRun] = set()
        self.calls: list[Call] = []
        """Every command so far; a command with ``stdin=PIPE`` is added when stdin is closed."""
        self.resizes: list[tuple[int, int]] = []
        """Window sizes, as (rows, columns), set by ``resize()``."""

    @property
    def commands(self) -> list[str | tuple[str, ...]]:
        """The ``cmd`` of every call."""
        return [call.cmd for call in self.calls]

    # The transport.

    @property
    def is_known(self) -> bool:
        """Always true."""
        return True

    @property
    def work_dir(self) -> str:
        """A fixed path that does not exist."""
        return _WORK_DIR

    @property
    def isolation(self) -> Isolation:
        """The report without any isolation layer."""
        return Isolation(backend=_BACKEND)

    @property
    def shell(self) -> str:
        """A fixed path; no shell runs."""
        return _SHELL

    async def open(self) -> None:
        """Do nothing."""

    async def start(self, spec: RunSpec, sink: Sink) -> _ScriptedRun:
        """Start the reply to one command; raise if the script has none."""
        reply = self._reply(spec)
        run = _ScriptedRun(spec, sink, reply, on_call=self._record, on_resize=self.resizes.append)
        self._runs.add(run)
        run.finished.add_done_callback(lambda _: self._runs.discard(run))
        run.begin()
        return run

    def _reply(self, spec: RunSpec) -> Reply:
        if not isinstance(self._answers, Mapping):
            return self._answers
        text = shlex.join(spec.argv) if spec.kind == "argv" else spec.text
        answers: dict[str | re.Pattern[str], Reply] = {}
        for key in self._answers:
            answers[key] = self._answers[key]  # type: ignore[index]  # its own key
        if text in answers:
            return answers[text]
        for key, reply in answers.items():
            if isinstance(key, re.Pattern) and key.search(text):
                return reply
        known = ", ".join(repr(k.pattern if isinstance(k, re.Pattern) else k) for k in answers)
        raise SandboxUsageError(
            f"the script has no reply for {text[:200]!r}",
            argument="cmd",
            code="unscripted",
            hint=f"it has replies for: {known}" if known else "the script is empty",
        )

    def _record(self, spec: RunSpec, stdin: bytes) -> Call:
        call = Call(
            cmd=spec.cmd,
            script_type=spec.kind,
            env=dict(spec.env),
            cwd=spec.cwd,
            stdin=stdin,
            network_mode=spec.network.mode,
            timeout_s=spec.timeout_s,
            background=spec.background,
            pty=spec.pty,
            files=self.files,
        )
        self.calls.append(call)
        return call

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        """Return only the work dir."""
        return {"read_only": (), "read_write": (_WORK_DIR,)}

    async def aclose(self) -> None:
        """End the commands that still run."""
        for run in tuple(self._runs):
            run.finish(128 + signal.SIGKILL, "closed")


class _ScriptedRun:
    """One scripted command in flight (the Run protocol)."""

    def __init__(
        self,
        spec: RunSpec,
        sink: Sink,
        reply: Reply,
        *,
        on_call: Callable[[RunSpec, bytes], Call],
        on_resize: Callable[[tuple[int, int]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._spec = spec
        self._sink = sink
        self.isolation = Isolation(backend=_BACKEND)
        self._reply = reply
        self._on_call = on_call
        self._on_resize = on_resize
        self._open = {fd: mode != "devnull" for fd, mode in ((1, spec.stdout), (2, spec.stderr))}
        self._room = {1: asyncio.Event(), 2: asyncio.Event()}
        self._stdin = bytearray()
        self._stdin_closed = asyncio.Event()
        self._limit: asyncio.TimerHandle | None = None
        self._playing: list[asyncio.Task[None]] = []
        self.finished: asyncio.Future[None] = self._loop.create_future()

    def begin(self) -> None:
        """Start the command or report its failure; exceptions of a callable reply propagate."""
        answer: Answer | None = None
        # A callable gets the complete input, so a command with piped stdin replies at its end.
        if self._spec.stdin != "pipe":
            answer = self._answer(self._spec.stdin or b"")
        elif not callable(self._reply):
            answer = _as_answer(self._reply)
        if answer is not None and answer.failure:
            self._fail("spawn", answer.failure)
            return
        self._sink.event(Started(2))
        if self._spec.timeout_s is not None:
            self._limit = self._loop.call_later(self._spec.timeout_s, self.end, "timeout")
        self._playing.append(self._loop.create_task(self._play(answer)))

    def _answer(self, stdin: bytes) -> Answer:
        call = self._on_call(self._spec, stdin)
        return _as_answer(self._reply(call) if callable(self._reply) else self._reply)

    async def _play(self, answer: Answer | None) -> None:
        if answer is None:
            await self._stdin_closed.wait()
            try:
                answer = self._answer(bytes(self._stdin))
            except BaseException as exc:
                self._fail("stream", f"the scripted reply raised {exc!r}")
                raise
        elif self._spec.stdin == "pipe":
            self._on_call(self._spec, b"")
        out, err = _as_bytes(answer.stdout), _as_bytes(answer.stderr)
        if self._spec.pty is not None or self._spec.merged:
            out, err = out + err, b""  # one output
        await asyncio.gather(self._write(1, out), self._write(2, err))
        await asyncio.sleep(answer.after_s)
        self.finish(answer.returncode, answer.termination_reason)

    async def _write(self, fd: int, data: bytes) -> None:
        if not self._open[fd]:
            return
        for start in range(0, len(data), _CHUNK_BYTES):
            self._room[fd].clear()
            if not self._sink.output(fd, data[start : start + _CHUNK_BYTES]):
                await self._room[fd].wait()

    def _fail(self, stage: str, reason: str) -> None:
        if not self.finished.done():
            self._stop()
            self._sink.event(Failed(stage, reason))

    def finish(self, returncode: int, reason: str) -> None:
        """End the command once: close its streams and report the exit code."""
        if self.finished.done():
            return
        self._stop()
        for fd, is_open in self._open.items():
            if is_open:
                self._sink.end_of_output(fd)
        self._sink.event(Exited(returncode, reason, Usage()))

    def _stop(self) -> None:
        self.finished.set_result(None)
        if self._limit is not None:
            self._limit.cancel()
        for task in self._playing:
            if task is not asyncio.current_task():
                task.cancel()

    # The Run protocol.

    def resume(self, fd: int) -> None:
        self._room[fd].set()

    def signal(self, signum: int) -> None:
        if signum in _ENDING_SIGNALS:
            self.finish(128 + signum, "signal")

    def end(self, cause: str) -> None:
        self.finish(128 + signal.SIGTERM, cause)

    def resize(self, rows: int, cols: int) -> None:
        self._on_resize((rows, cols))

    def feed_stdin(self, data: bytes) -> None:
        self._stdin += data

    async def drain_stdin(self) -> None:
        if self.finished.done():
            raise BrokenPipeError("the command has ended and no longer reads stdin")

    def close_stdin(self) -> None:
        self._stdin_closed.set()


def _as_answer(reply: object) -> Answer:
    match reply:
        case Answer():
            return reply
        case str() | bytes():
            return Answer(stdout=reply)
        case int() if not isinstance(reply, bool):
            return Answer(returncode=reply)
    raise SandboxUsageError(
        f"a scripted reply must be str, bytes, an exit code or an Answer, not {reply!r}",
        argument="answers",
    )


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


def scripted_session(
    answers: Answers | ScriptedTransport,
    *,
    files: Mapping[str, bytes] | None = None,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    network_mode: str | None = None,
    network_allowlist: Sequence[str | Http] | None = None,
) -> Session:
    """Return a session whose commands get their replies from ``answers``.

    A command without a reply raises ``SandboxUsageError`` with the code ``unscripted``.

    Args:
        answers: replies by command, a callable, or a ``ScriptedTransport``, whose ``calls`` and
            ``files`` can be checked afterwards.
        files: initial content by path below the work dir; None (default) for none.
        timeout_s: seconds until the session closes; None (default) for no limit.
        env: variables of every command; None (default) for none.
        network_mode: ``"blocked"``, ``"allowlist"`` or ``"open"``; None (default) for blocked
            unless a call opens it.
        network_allowlist: hosts for mode ``"allowlist"``; None (default) for no list.

    """
    if isinstance(answers, ScriptedTransport):
        if files is not None:
            raise SandboxUsageError(
                "files must be passed to the ScriptedTransport",
                argument="files",
            )
        transport = answers
    else:
        transport = ScriptedTransport(answers, files=files)
    spec = resolve_session(
        backend=_BACKEND,
        backends=(_BACKEND,),
        timeout_s=timeout_s,
        env=env,
        network_mode=network_mode,
        network_allowlist=network_allowlist,
    )
    return Session(spec, SingleUseLifecycle(spec, lambda: transport))

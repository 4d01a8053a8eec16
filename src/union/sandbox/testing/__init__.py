r"""A session that runs nothing: for the tests of programs that use sandboxes.

``ScriptedTransport`` answers commands from a script, keeps files in memory and records every call.
The session on top of it is the real one: arguments are checked, streams flow, time limits pass and
errors are raised as they are with a sandbox.

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
from union.sandbox._session.session import Session
from union.sandbox.errors import SandboxUsageError
from union.sandbox.testing._memory_files import MemoryFiles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from union.sandbox._core.spec import RunSpec
    from union.sandbox._session.transport import Sink

__all__ = ["Answer", "Answers", "Call", "Reply", "ScriptedTransport", "scripted_session"]

_WORK_DIR: Final = "/sandbox/work"
_BACKEND: Final = "scripted"
_CHUNK: Final = 64 * 1024

_ENDING: Final = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGKILL, signal.SIGTERM}
)
"""What ends a program that handles no signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """How a scripted command behaves.

    ``after_s`` is how long it runs before it ends; its output comes at once, so a time limit finds
    it written. ``failure`` makes it a command that never started: ``SandboxExecutionError``.
    """

    stdout: str | bytes = b""
    stderr: str | bytes = b""
    returncode: int = 0
    termination_reason: str = ""
    after_s: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One command as the session asked for it."""

    cmd: str | tuple[str, ...]
    """Shell text or Python source as given (dedented), or an argv."""
    script_type: str
    """``shell``, ``python`` or ``argv``."""
    env: dict[str, str]
    cwd: str | None
    stdin: bytes
    """All of it: with ``stdin=PIPE``, what was written until it was closed."""
    network_mode: str
    timeout_s: float | None
    background: bool
    pty: tuple[int, int] | None = None
    """Rows and columns of its terminal, as it started."""
    files: dict[str, bytes]
    """The session's files by path below the work dir; a reply may change them."""


Reply = str | bytes | int | Answer | Callable[["Call"], "str | bytes | int | Answer"]
"""Text is stdout, a number is an exit code, a callable is asked when the command runs."""
Answers = (
    Mapping[str, Reply]
    | Mapping[re.Pattern[str], Reply]
    | Mapping[str | re.Pattern[str], Reply]
    | Callable[[Call], "str | bytes | int | Answer"]
)
"""Replies by command: a str is the whole command, a pattern is searched for in it."""


class ScriptedTransport(MemoryFiles):
    """Answers commands from a script; implements the transport that a session stands on."""

    def __init__(self, answers: Answers, *, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(_WORK_DIR, files)
        self._answers = answers
        self._runs: set[_ScriptedRun] = set()
        self.calls: list[Call] = []
        """Every command so far; one that reads ``stdin=PIPE`` is added when that is closed."""
        self.resizes: list[tuple[int, int]] = []
        """The windows that commands with a terminal were given after their start."""

    @property
    def commands(self) -> list[str | tuple[str, ...]]:
        """The commands of ``calls``."""
        return [call.cmd for call in self.calls]

    # The transport.

    @property
    def is_known(self) -> bool:
        """Always: there is nothing to find out."""
        return True

    @property
    def work_dir(self) -> str:
        """The path that stands for the work dir; nothing is there."""
        return _WORK_DIR

    @property
    def isolation(self) -> Isolation:
        """No layer at all."""
        return Isolation(backend=_BACKEND)

    async def open(self) -> None:
        """Nothing to set up."""

    async def start(self, spec: RunSpec, sink: Sink) -> _ScriptedRun:
        """Plays the answer for one command; raises if the script has none."""
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
            f"no answer is scripted for {text[:200]!r}",
            argument="cmd",
            code="unscripted",
            hint=f"there are answers for: {known}" if known else "the script is empty",
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
        """Only the work dir."""
        return {"read_only": (), "read_write": (_WORK_DIR,)}

    async def aclose(self) -> None:
        """Ends the commands that still run."""
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
        """Starts, or fails to; raises what a callable reply raises."""
        answer: Answer | None = None
        # A program that reads its stdin can answer only when it has all of it.
        if self._spec.stdin != "pipe":
            answer = self._ask(self._spec.stdin or b"")
        elif not callable(self._reply):
            answer = _settled(self._reply)
        if answer is not None and answer.failure:
            self._fail("spawn", answer.failure)
            return
        self._sink.event(Started(2))
        if self._spec.timeout_s is not None:
            self._limit = self._loop.call_later(self._spec.timeout_s, self.end, "timeout")
        self._playing.append(self._loop.create_task(self._play(answer)))

    def _ask(self, stdin: bytes) -> Answer:
        call = self._on_call(self._spec, stdin)
        return _settled(self._reply(call) if callable(self._reply) else self._reply)

    async def _play(self, answer: Answer | None) -> None:
        if answer is None:
            await self._stdin_closed.wait()
            try:
                answer = self._ask(bytes(self._stdin))
            except BaseException as exc:
                self._fail("stream", f"the scripted answer raised {exc!r}")
                raise
        elif self._spec.stdin == "pipe":
            self._on_call(self._spec, b"")
        out, err = _as_bytes(answer.stdout), _as_bytes(answer.stderr)
        if self._spec.pty is not None:
            out, err = out + err, b""  # a terminal has one output
        await asyncio.gather(self._write(1, out), self._write(2, err))
        await asyncio.sleep(answer.after_s)
        self.finish(answer.returncode, answer.termination_reason)

    async def _write(self, fd: int, data: bytes) -> None:
        if not self._open[fd]:
            return
        for start in range(0, len(data), _CHUNK):
            self._room[fd].clear()
            if not self._sink.output(fd, data[start : start + _CHUNK]):
                await self._room[fd].wait()

    def _fail(self, stage: str, reason: str) -> None:
        if not self.finished.done():
            self._stop()
            self._sink.event(Failed(stage, reason))

    def finish(self, returncode: int, reason: str) -> None:
        """The end, once: closes the streams and tells the exit code."""
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
        if signum in _ENDING:
            self.finish(128 + signum, "signal")

    def end(self, cause: str) -> None:
        self.finish(128 + signal.SIGTERM, cause)

    def resize(self, rows: int, cols: int) -> None:
        self._on_resize((rows, cols))

    def feed_stdin(self, data: bytes) -> None:
        self._stdin += data

    async def drain_stdin(self) -> None:
        if self.finished.done():
            raise BrokenPipeError("the command does not read its stdin any more")

    def close_stdin(self) -> None:
        self._stdin_closed.set()


def _settled(reply: object) -> Answer:
    match reply:
        case Answer():
            return reply
        case str() | bytes():
            return Answer(stdout=reply)
        case int() if not isinstance(reply, bool):
            return Answer(returncode=reply)
    raise SandboxUsageError(
        f"a scripted answer must be text, bytes, an exit code or an Answer, not {reply!r}",
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
    network_allowlist: Sequence[str] | None = None,
) -> Session:
    """A session whose commands are answered by ``answers``; opened and closed like any other.

    Pass a ``ScriptedTransport`` to look at its ``calls`` and ``files`` afterwards. A command that
    has no answer raises ``SandboxUsageError`` with the code ``unscripted``.
    """
    if isinstance(answers, ScriptedTransport):
        if files is not None:
            raise SandboxUsageError(
                "files belongs to the ScriptedTransport that was passed", argument="files"
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
    return Session(spec, lambda: transport)

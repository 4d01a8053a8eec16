"""The sandboxes of one MCP server, and the commands that go on in them."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from union.sandbox.adapters._common import LazySession, carry, session_options
from union.sandbox.constants import PIPE, STDOUT
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union.sandbox._session.process import SandboxProcess

__all__ = ["BoundedText", "Job", "Sandbox", "Sandboxes"]

MAX_TEXT: Final = 32_000
"""Bytes of each stream that a result shows: models pay for what they read."""
MAX_JOBS: Final = 16


class BoundedText:
    """The beginning and the end of a stream, with a note in between if something was left out."""

    def __init__(self, limit: int = MAX_TEXT) -> None:
        self._half = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self._dropped = 0

    @property
    def is_cut(self) -> bool:
        """Whether something was left out."""
        return self._dropped > 0

    def add(self, data: bytes) -> None:
        """Append bytes."""
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= self._half:
                gone = self._tail.popleft()
                self._tail_size -= len(gone)
                self._dropped += len(gone)
            excess = self._tail_size - self._half
            if excess > 0:
                self._tail[0] = self._tail[0][excess:]
                self._tail_size -= excess
                self._dropped += excess

    def text(self) -> str:
        """Return the text; invalid UTF-8 is replaced."""
        head, tail = bytes(self._head), b"".join(self._tail)
        if not self._dropped:
            return (head + tail).decode("utf-8", "replace")
        note = f"\n[... {self._dropped} bytes left out ...]\n"
        return head.decode("utf-8", "replace") + note + tail.decode("utf-8", "replace")


class Job:
    """A command that runs until it ends or is stopped; its output is read all the time."""

    def __init__(self, process: SandboxProcess) -> None:
        self.process = process
        self._unread = BoundedText()
        self._reader: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start to read the output; runs in the loop of the session."""
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for chunk in self.process.iter_stdout():
            self._unread.add(chunk)
        await self.process.wait()

    async def take(self, wait_s: float) -> BoundedText:
        """Wait up to ``wait_s`` for the end; return the output since the last call."""
        if self._reader is not None and wait_s > 0:
            await asyncio.wait([self._reader], timeout=wait_s)
        taken, self._unread = self._unread, BoundedText()
        return taken

    async def stop(self, grace_s: float) -> None:
        """Terminate the command; kill it if it has not ended after ``grace_s``."""
        self.process.terminate()
        if self._reader is not None:
            done, _ = await asyncio.wait([self._reader], timeout=grace_s)
            if not done:
                self.process.kill()
                await asyncio.wait([self._reader])


class Sandbox:
    """One sandbox: a session, its interpreter and its jobs."""

    def __init__(self, session: LazySession) -> None:
        self.session = session
        self.jobs: dict[str, Job] = {}
        self._number = 0

    async def start(self, command: str, **arguments: Any) -> str:
        """Start a job and return its id."""
        live = await self.session.opened()
        if len(self.jobs) >= MAX_JOBS:
            ended = [name for name, job in self.jobs.items() if job.process.returncode is not None]
            for name in ended:
                del self.jobs[name]
        if len(self.jobs) >= MAX_JOBS:
            raise SandboxUsageError(
                f"{MAX_JOBS} commands run already", hint="stop one with stop_command"
            )
        process = await live.run(command, stdout=PIPE, stderr=STDOUT, background=True, **arguments)
        job = Job(process)
        await carry(job.begin)
        self._number += 1
        name = f"job-{self._number}"
        self.jobs[name] = job
        return name

    async def end_running(self) -> None:
        """End the interpreter and the jobs."""
        await self.session.end_contexts()

        async def stop() -> None:
            running = (job for job in self.jobs.values() if job.process.returncode is None)
            await asyncio.gather(*(job.stop(0) for job in running))

        await carry(stop)

    def job(self, name: str) -> Job:
        """Return a job by its id."""
        job = self.jobs.get(name)
        if job is None:
            raise SandboxUsageError(
                f"there is no command with the id {name!r:.80}",
                hint=f"ids: {', '.join(self.jobs) or 'none'}",
            )
        return job


class Sandboxes:
    """The sandboxes by name. The first use of a name creates one."""

    def __init__(
        self,
        session: object,
        options: Mapping[str, Any],
        *,
        limit: int,
        max_timeout_s: float | None = None,
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise SandboxUsageError(
                f"max_sandboxes must be a whole number from 1, not {limit!r}",
                argument="max_sandboxes",
            )
        self._given = session
        self._options = dict(options)
        self.limit = limit
        self.max_timeout_s = math.inf if max_timeout_s is None else max_timeout_s
        self._lock = threading.Lock()
        self._by_name: dict[str, Sandbox] = {}

    @property
    def is_online(self) -> bool:
        """Whether commands may reach any host."""
        if self._given is not None:
            given: Any = getattr(self._given, "_target", self._given)
            return given._spec.network.mode != "blocked"  # noqa: SLF001 - its own settings
        return self._options.get("network_mode", "blocked") != "blocked"

    @property
    def has_checkpoints(self) -> bool:
        """Whether the state of a sandbox is its work dir, which checkpoints keep."""
        if self._given is not None:
            given: Any = getattr(self._given, "_target", self._given)
            return given._spec.persist != "machine"  # noqa: SLF001 - its own settings
        return session_options(self._options).get("persist", "workdir") != "machine"

    def instructions(self) -> str:
        """Return the description of the server for models."""
        network = "is limited by a policy" if self.is_online else "is blocked"
        return (
            "An isolated Linux sandbox. Paths are relative to its work dir, which all tools share "
            "and which persists between calls. run_code keeps variables between calls. "
            f"The network {network}."
        )

    def get(self, name: str) -> Sandbox:
        """Return a sandbox by name."""
        with self._lock:
            found = self._by_name.get(name)
            if found is None:
                if len(self._by_name) >= self.limit:
                    raise SandboxUsageError(
                        f"sandbox limit reached ({self.limit})",
                        hint=f"reset one of: {', '.join(self._by_name)}",
                    )
                found = self._by_name[name] = Sandbox(
                    LazySession(self._given, options=self._options)
                )
            return found

    async def reset(self, name: str) -> None:
        """Close a sandbox; the next use of its name creates a new one."""
        if self._given is not None:
            raise SandboxUsageError(
                "this server uses a session of its owner, which it cannot reset",
                hint="remove files with run_command",
            )
        with self._lock:
            found = self._by_name.pop(name, None)
        if found is not None:
            await found.session.aclose()

    def close(self) -> None:
        """Close all sandboxes."""
        with self._lock:
            found = list(self._by_name.values())
            self._by_name.clear()
        for sandbox in found:
            sandbox.session.close()

"""A sandbox-server of the soak's own, started again whenever it was killed."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.soaking.state import children_of

from union import sandbox as sb
from union.sandbox._linux.launcher import BINARY

__all__ = ["OwnServer"]


class OwnServer:
    """``sandbox-server`` with a token, in a directory of its own."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(24)
        self._place = Path(tempfile.mkdtemp(prefix="soak-server-", dir="/var/tmp"))
        self.pids: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""
        self._start()

    def _start(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SANDBOX_SERVER")}
        environment["SANDBOX_SERVER_TOKEN"] = self.token
        argv = [sys.executable, "-m", "union.sandbox.server", "--bind", "127.0.0.1:0"]
        # A client that was killed is missed soon.
        argv += ["--work-dir", str(self._place / "work"), "--grace", "5"]
        with (self._place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        self.pids.append(self._process.pid)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:  # else it was killed before it could say where it is
            self.endpoint = json.loads(line)["ready"][0]

    def is_running(self) -> bool:
        """Whether it has not been killed."""
        return self._process is not None and self._process.poll() is None

    async def start_again(self) -> None:
        """Another one in the place of one that was killed, at another address."""
        self._let_go()
        await asyncio.to_thread(self._start)

    def processes(self) -> dict[str, int]:
        """What can be killed of it."""
        if self._process is None or not self.is_running():
            return {}
        found = {"server": self._process.pid}
        for pid in self.launchers():
            found["server's launcher"] = pid
        return found

    def launchers(self) -> list[int]:
        """The launcher of the server, if it has started one."""
        if self._process is None:
            return []
        return [pid for pid in children_of(self._process.pid) if _is_launcher(pid)]

    async def close_sessions(self) -> None:
        """Waits until the server has missed every client that was killed."""
        while self.is_running() and self._work_dirs(self.pids[-1:]):  # noqa: ASYNC110 - another process's doing
            await asyncio.sleep(0.1)
        if not self.is_running():
            await self.start_again()

    def _work_dirs(self, makers: list[int]) -> list[str]:
        work = self._place / "work"
        return [str(path) for pid in makers for path in work.glob(f"sandbox-{pid}-*")]

    async def left(self) -> list[str]:
        """Work dirs of servers that were killed, and that the next one has not removed."""
        if not self.is_running():
            await self.start_again()
        # That is done when the first session of a server is opened.
        async with sb.remote.session(endpoint=self.endpoint, token=self.token, lazy=False):
            return self._work_dirs(self.pids[:-1])

    def _let_go(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
            self._process.wait()

    def stop(self) -> None:
        """Ends it, and removes what it was given."""
        if self._process is not None and self.is_running():
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._let_go()
        shutil.rmtree(self._place, ignore_errors=True)


def _is_launcher(pid: int) -> bool:
    try:
        return os.path.samefile(f"/proc/{pid}/exe", BINARY)
    except OSError:
        return False

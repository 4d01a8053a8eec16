"""The sandbox-server of the soak, restarted after each kill."""

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
    """A ``sandbox-server`` with a token, in its own directory."""

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
        # A short grace period, so that sessions of killed clients end soon.
        argv += ["--work-dir", str(self._place / "work"), "--grace", "5"]
        with (self._place / "log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        self.pids.append(self._process.pid)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:  # Otherwise it was killed before it printed its endpoint.
            self.endpoint = json.loads(line)["ready"][0]

    def is_running(self) -> bool:
        """Return whether it is still running."""
        return self._process is not None and self._process.poll() is None

    async def start_again(self) -> None:
        """Start a new server in place of a killed one, at another address."""
        self._let_go()
        await asyncio.to_thread(self._start)

    def processes(self) -> dict[str, int]:
        """Return the processes that can be killed, by role."""
        if self._process is None or not self.is_running():
            return {}
        found = {"server": self._process.pid}
        for pid in self.launchers():
            found["server's launcher"] = pid
        return found

    def launchers(self) -> list[int]:
        """Return the launchers of the server."""
        if self._process is None:
            return []
        return [pid for pid in children_of(self._process.pid) if _is_launcher(pid)]

    async def close_sessions(self) -> None:
        """Wait until the server has ended the sessions of all killed clients."""
        while self.is_running() and self._work_dirs(self.pids[-1:]):  # noqa: ASYNC110 - another process ends them
            await asyncio.sleep(0.1)
        if not self.is_running():
            await self.start_again()

    def _work_dirs(self, makers: list[int]) -> list[str]:
        work = self._place / "work"
        return [str(path) for pid in makers for path in work.glob(f"sandbox-{pid}-*")]

    async def left(self) -> list[str]:
        """Return work dirs of killed servers that the next server has not removed."""
        if not self.is_running():
            await self.start_again()
        # A server removes them when its first session opens.
        async with sb.remote.session(endpoint=self.endpoint, token=self.token, lazy=False):
            return self._work_dirs(self.pids[:-1])

    def _let_go(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
            self._process.wait()

    def stop(self) -> None:
        """End the server and remove its directory."""
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

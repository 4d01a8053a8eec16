"""The contenders: each runs in its own process, with one JSON message per line."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".cache" / "peers"
"""Virtualenvs of the peers, created by `make bench-peers`."""
BARE = "bare"
OURS = "union.sandbox"
"""This package with its default backend."""
REMOTE = f"{OURS}, remote"
"""userns over a server on loopback: the difference to userns is the cost of the protocol."""
# The ordinary use of each according to its manual, with isolation comparable to our default.
BWRAP = "--unshare-all --die-with-parent --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp"
RUNSC = "--rootless --network=none do"
PATIENCE_S = 120.0


class ContenderError(Exception):
    """A contender cannot do an operation; the message has the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """The command that starts a contender."""

    name: str
    driver: str
    options: dict[str, Any]
    python: str = sys.executable
    missing: str = ""
    """The reason why it cannot take part, or empty."""


def all_contenders(port: int, *, peers: bool) -> list[Contender]:
    """Return all contenders, the bare one first; those not installed have a reason."""
    found = [
        Contender(name=BARE, driver="command", options={"prefix": [], "port": port}),
        *(
            Contender(
                name=name,
                driver="session",
                options={"backend": backend, "port": port, "ours": True},
            )
            for name, backend in ((OURS, "bubblewrap"), (f"{OURS} userns", "userns"))
        ),
        Contender(name=REMOTE, driver="remote", options={"backend": "userns"}),
    ]
    if not peers:
        return found
    options = {"port": port, "ours": False}
    return [
        *found,
        *(
            _from_index("unionai-sandbox", kind, "session", options | {"backend": kind})
            for kind in ("userns", "bubblewrap")
        ),
        _from_index("sandlock", "", "sandlock", {}),
        _program("bwrap", BWRAP, port),
        _program("runsc", RUNSC, port),
    ]


def _from_index(package: str, kind: str, driver: str, options: dict[str, Any]) -> Contender:
    python = PEERS / package / "bin" / "python"
    return Contender(
        name=f"{package} {kind}".strip(),
        driver=driver,
        options=options,
        python=str(python),
        missing="" if python.exists() else "not installed (make bench-peers)",
    )


def _program(name: str, arguments: str, port: int) -> Contender:
    path = shutil.which(name)
    return Contender(
        name=name,
        driver="command",
        options={"prefix": [path or name, *arguments.split()], "port": port},
        missing="" if path else "not on the PATH",
    )


@dataclass(slots=True)
class Worker:
    """The process of a contender."""

    contender: Contender
    operations: frozenset[str] = frozenset()
    version: str = ""
    _process: asyncio.subprocess.Process | None = field(default=None, repr=False)
    _complaints: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Version of the contender."""
        return self.contender.name

    @property
    def pid(self) -> int:
        """Pid of the worker, whose descendants are all processes of the contender."""
        return self._running().pid

    async def start(self) -> Worker:
        """Start the process; return when it is ready."""
        contender = self.contender
        if contender.missing:
            raise ContenderError(contender.missing)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        own = os.path.dirname(contender.python)
        self._process = await asyncio.create_subprocess_exec(
            contender.python,
            "-m",
            "bench.peers.worker",
            contender.driver,
            json.dumps(contender.options),
            cwd=ROOT,
            # A peer may search its own tools on the PATH.
            env=os.environ | {"PATH": f"{own}:{os.environ.get('PATH', os.defpath)}"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._complaints,
        )
        try:
            reply = await self._reply()
        except BaseException:
            await self.close()
            raise
        self.operations = frozenset(reply["operations"])
        self.version = reply["version"]
        return self

    async def request(self, **fields: Any) -> dict[str, Any]:
        """Send one request and return the reply."""
        stdin = self._running().stdin
        if stdin is None:
            raise RuntimeError("no pipe")
        try:
            stdin.write(json.dumps(fields).encode() + b"\n")
            await stdin.drain()
        except ConnectionError as exc:
            raise ContenderError(self._last_output()) from exc
        return await self._reply()

    async def seconds(self, operation: str, times: int = 1) -> list[float]:
        """Return the seconds of each call."""
        return list((await self.request(operation=operation, times=times))["seconds"])

    async def close(self) -> None:
        """End the process and all its descendants."""
        process = self._running()
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), PATIENCE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        self._complaints.close()

    async def _reply(self) -> dict[str, Any]:
        stdout = self._running().stdout
        if stdout is None:
            raise RuntimeError("no pipe")
        try:
            line = await asyncio.wait_for(stdout.readline(), PATIENCE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._running().kill()
            raise ContenderError(f"no answer in {PATIENCE_S:.0f} s") from None
        if not line:
            raise ContenderError(self._last_output())
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ContenderError(reply["error"])
        return reply

    def _last_output(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it ended without output")

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("not started")
        return self._process

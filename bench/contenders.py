"""Who takes part: each contender in its own process, spoken to line by line."""

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
"""A virtualenv for each peer; `make bench-peers` makes them."""
BARE = "bare"
OURS = "union.sandbox"
"""With the backend that a session has unless it asks for another."""
REMOTE = f"{OURS}, remote"
"""userns over a server on loopback: what it adds to userns is what the wire costs."""
# What the manual of each calls the ordinary use, with as much isolation as ours has by default.
BWRAP = "--unshare-all --die-with-parent --ro-bind / / --dev /dev --proc /proc --tmpfs /tmp"
RUNSC = "--rootless --network=none do"
PATIENCE_S = 120.0


class ContenderError(Exception):
    """A contender that cannot do what was asked, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """How to start one."""

    name: str
    driver: str
    options: dict[str, Any]
    python: str = sys.executable
    missing: str = ""
    """Why it cannot take part, if so."""


def everybody(port: int, *, peers: bool) -> list[Contender]:
    """All contenders, the bare one first; those that are not installed say so."""
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
    """A contender at work."""

    contender: Contender
    operations: frozenset[str] = frozenset()
    version: str = ""
    _process: asyncio.subprocess.Process | None = field(default=None, repr=False)
    _complaints: Any = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Of the contender."""
        return self.contender.name

    @property
    def pid(self) -> int:
        """Of the process that all it starts is below."""
        return self._running().pid

    async def start(self) -> Worker:
        """Starts the process; returns when it is ready."""
        asked = self.contender
        if asked.missing:
            raise ContenderError(asked.missing)
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        own = os.path.dirname(asked.python)
        self._process = await asyncio.create_subprocess_exec(
            asked.python,
            "-m",
            "bench.peers.worker",
            asked.driver,
            json.dumps(asked.options),
            cwd=ROOT,
            # A peer may look for its own tools on the PATH.
            env=os.environ | {"PATH": f"{own}:{os.environ.get('PATH', os.defpath)}"},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._complaints,
        )
        try:
            told = await self._answer()
        except BaseException:
            await self.close()
            raise
        self.operations = frozenset(told["operations"])
        self.version = told["version"]
        return self

    async def ask(self, **request: Any) -> dict[str, Any]:
        """One request, one answer."""
        stdin = self._running().stdin
        if stdin is None:
            raise RuntimeError("no pipe")
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            await stdin.drain()
        except ConnectionError as exc:
            raise ContenderError(self._last_words()) from exc
        return await self._answer()

    async def seconds(self, operation: str, times: int = 1) -> list[float]:
        """What each of some calls took."""
        return list((await self.ask(operation=operation, times=times))["seconds"])

    async def close(self) -> None:
        """Ends the process, and with it all it has started."""
        process = self._running()
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), PATIENCE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
        self._complaints.close()

    async def _answer(self) -> dict[str, Any]:
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
            raise ContenderError(self._last_words())
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise ContenderError(told["error"])
        return told

    def _last_words(self) -> str:
        self._complaints.seek(0)
        lines = self._complaints.read().decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it ended without a word")

    def _running(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("not started")
        return self._process

"""Pods that are processes of this machine.

Of a real pod such a process has the arguments, the environment, an address of its own (in
127.0.0.0/8), a directory of its own as home, scratch and working directory, a log, and the fate:
the first process gets SIGTERM, everything gets SIGKILL after the grace, and nothing outlives the
first process. As in a pod, where it is PID 1, the first process ignores SIGTERM unless it
handles it. It has no image, no namespaces and no limits, and it shares its user with the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.plane.podspec import primary_of

_WAIT_S = 2.0
_FROM_THE_MACHINE = ("LANG", "TZ")


class ProcessPods:
    """Starts pods as processes, each with its own directory."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._numbers = itertools.count(2)
        self._subnet = f"127.{random.randint(1, 254)}"
        self.made: list[ProcessPod] = []

    async def start(self, manifest: dict[str, Any]) -> ProcessPod:
        """Start a pod. Nothing is awaited, so a cancelled caller leaves no process."""
        number = next(self._numbers)
        ip = f"{self._subnet}.{number // 250}.{number % 250 + 2}"
        pod = ProcessPod(manifest, self._place / str(number), ip)
        self.made.append(pod)
        return pod


class ProcessPod:
    """One pod: a process in a session of its own."""

    def __init__(self, manifest: dict[str, Any], place: Path, ip: str) -> None:
        self.manifest, self.place, self.ip = manifest, place, ip
        self.name: str = manifest["metadata"]["name"]
        self.namespace: str = manifest["metadata"]["namespace"]
        self.born = time.monotonic()
        self.uid = f"{self.name}.{os.getpid()}.{place.name}"
        self.notes: list[tuple[str, str]] = []
        self.orphans: set[int] = set()
        """Processes that outlived the first one, and had to be killed."""
        self.term_s: float | None = None
        """Seconds from SIGTERM to the end of the first process; None without a SIGTERM."""
        for folder in ("home", "tmp", "work"):
            (place / folder).mkdir(parents=True)
        self._log = place / "log"
        container = primary_of(manifest["spec"])
        self.environment = self._environment(container)
        argv = [*container.get("command", []), *container.get("args", [])]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["/usr/bin/env", "--ignore-signal=TERM", *argv],
                env=self.environment,
                cwd=place / "work",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._ending = asyncio.Lock()
        self._insist = False
        self._seen: set[int] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    async def log_from(self, offset: int) -> bytes:
        with self._log.open("rb") as log:
            log.seek(offset)
            return log.read()

    async def running(self) -> None:
        """Return at once: a process has no image to pull."""

    async def ended(self) -> int:
        while (code := self._process.poll()) is None:
            await asyncio.sleep(0.02)
        return code

    async def end(self, grace_s: float) -> None:
        # This call must not wait for the grace period of another call.
        self._insist = self._insist or grace_s <= 0
        async with self._ending:
            self._seen |= _below(self.pid)
            if not self.is_over and grace_s > 0:
                asked = time.monotonic()
                self._signal(signal.SIGTERM)
                while not (self.is_over or self._insist) and time.monotonic() < asked + grace_s:
                    await asyncio.sleep(0.02)
                self.term_s = time.monotonic() - asked if self.is_over else None
            if not self.is_over:
                self._signal(signal.SIGKILL)
                await self.ended()
            await self._sweep()

    def processes(self) -> set[int]:
        """Return the live processes of this pod: by directory, by session, or as descendants."""
        found = {pid for pid in self._seen | _below(self.pid) if _alive(pid)}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and _alive(int(entry)) and self._owns(int(entry)):
                found.add(int(entry))
        return found

    def _owns(self, pid: int) -> bool:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            return f"{self.place}/".encode() in environment or os.getsid(pid) == self.pid
        except OSError:
            return False

    async def _sweep(self) -> None:
        """Wait briefly for processes to end; kill the rest, and record that there were some."""
        limit = time.monotonic() + _WAIT_S
        while (left := self.processes()) and time.monotonic() < limit:
            await asyncio.sleep(0.02)
        self.orphans |= left
        while left:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.02)
            left = self.processes()
        for folder in ("home", "tmp", "work"):
            shutil.rmtree(self.place / folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def _environment(self, container: dict[str, Any]) -> dict[str, str]:
        """Return the environment of a container, with nothing of this machine but the tools."""
        found = {name: os.environ[name] for name in _FROM_THE_MACHINE if name in os.environ}
        found |= {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.place / "home"),
            "TMPDIR": str(self.place / "tmp"),
            "HOSTNAME": self.name,
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": "9",
            "DO_NOT_TRACK": "1",
        }
        fields = {
            "status.podIP": self.ip,
            "status.podIPs": self.ip,
            "status.hostIP": "127.0.0.1",
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
        }
        for entry in container.get("env", []):
            source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[entry["name"]] = fields[source] if source else entry.get("value", "")
        return found


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def _below(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        for task in Path(f"/proc/{current}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                fresh = set(map(int, task.read_text().split())) - found
                found |= fresh
                waiting.extend(fresh)
    return found

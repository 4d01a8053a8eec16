"""Targets on the host that a sandbox must not reach, and programs that own sessions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SECRET = "plant-secret-5f1c"
_VICTIM = """
import ctypes, json, os, resource, signal, sys
memory = ctypes.create_string_buffer(b"untouched" + bytes(23))
hits = []
for number in (1, 2, 10, 12, 15):
    signal.signal(number, lambda n, frame: hits.append(n))
held = os.open(sys.argv[1], os.O_RDWR)
print(json.dumps({"pid": os.getpid(), "address": ctypes.addressof(memory), "fd": held}), flush=True)
for line in sys.stdin:
    print(json.dumps({
        "memory": memory.value.decode(), "signals": hits, "pid": os.getpid(),
        "nice": os.getpriority(os.PRIO_PROCESS, 0), "affinity": sorted(os.sched_getaffinity(0)),
        "files": list(resource.getrlimit(resource.RLIMIT_NOFILE)),
    }), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Victim:
    """A process of the host with a secret in its environment, its memory and an open file."""

    process: subprocess.Popen[str]
    pid: int
    address: int
    fd: int
    directory: Path

    def as_given(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "address": self.address,
            "fd": self.fd,
            "driver": os.getpid(),
            "mark": SECRET,
        }

    def report(self) -> dict[str, Any]:
        """Return what the process reports about itself; fails if it is not alive."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def receives(self, number: int) -> bool:
        """Positive control: a signal of the host does arrive."""
        os.kill(self.pid, number)
        # The handler runs between two lines of the victim's loop, so the second one shows it.
        self.report()
        return number in self.report()["signals"]


def start_victim(directory: Path) -> Victim:
    held = directory / "held"
    held.write_text(SECRET)
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _VICTIM, str(held), SECRET],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PLANT_TOKEN": SECRET},
        cwd=directory,
        text=True,
    )
    assert process.stdout is not None
    started = json.loads(process.stdout.readline())
    return Victim(process, started["pid"], started["address"], started["fd"], directory)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill one process that a test started, and close its pipes."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


_DRIVER = """
import asyncio, json, os, signal, sys, threading, time
from union import sandbox as sb

def session(**options):
    return sb.on_device.session(backend={way!r}, **options)

async def main():
{body}

asyncio.run(main())
"""


def driver_source(way: str, body: str) -> str:
    """Return a program that owns sessions; `body` is the body of an async function."""
    return _DRIVER.format(way=way, body=textwrap.indent(textwrap.dedent(body).strip("\n"), "    "))


def start_driver(
    way: str,
    body: str,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start such a program; the caller ends it."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", driver_source(way, body), *args],
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **{"stdin": subprocess.DEVNULL, **options},
    )


def drive(
    way: str,
    body: str,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> str:
    """Run such a program to its end; return its stdout."""
    stdin = options.pop("feed", None)
    if stdin is not None:
        options["stdin"] = subprocess.PIPE
    process = start_driver(way, body, args=args, env=env, **options)
    try:
        stdout, stderr = process.communicate(stdin, timeout=30)
    finally:
        end(process)
    assert process.returncode == 0, stderr
    return stdout


def command_lines() -> dict[int, bytes]:
    """Return the command lines of all processes that this user can see."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                found[int(entry)] = Path("/proc", entry, "cmdline").read_bytes()
            except OSError:
                continue
    return found


def marked(mark: str) -> set[int]:
    """Return the host pids of processes whose command line contains `mark`."""
    return {pid for pid, line in command_lines().items() if mark.encode() in line}


def snapshot(root: Path) -> dict[str, tuple[Any, ...]]:
    """Return every property of a tree that an attack could change."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in (root, *sorted(root.rglob("*"))):
        s = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found[str(path)] = (
            s.st_mode, s.st_uid, s.st_gid, s.st_nlink, s.st_size, s.st_mtime_ns, s.st_ino, data,
        )  # fmt: skip
    return found

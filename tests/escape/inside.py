"""Attack programs: run inside a sandbox by `attack`, or bare by `outside` to show that they work."""

# ruff: noqa: E501 - an attack program keeps each try on one line
from __future__ import annotations

import asyncio
import json
import platform
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from union.sandbox._seccomp.syscalls import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from union import sandbox as sb

LIMIT_S = 25.0

_PRELUDE = """
import ctypes, errno, json, os, platform, signal, socket, stat, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
out = {}

def call(name, *args):
    # A raw system call: "ok", or the name of its errno.
    ctypes.set_errno(0)
    wide = [a if isinstance(a, (bytes, ctypes._Pointer, ctypes.Array)) or a is None
            else ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    number = NR[name] if isinstance(name, str) else name
    result = libc.syscall(ctypes.c_long(number), *wide)
    return "ok" if result != -1 else errno.errorcode[ctypes.get_errno()]

def attempt(function, *args, **options):
    # "ok", or the name of the error.
    try:
        function(*args, **options)
    except OSError as exc:
        return errno.errorcode.get(exc.errno, type(exc).__name__)
    except Exception as exc:
        return type(exc).__name__
    return "ok"

def read(path):
    with open(path, "rb") as file:
        return file.read().decode("utf-8", "replace")

def write(path, text="changed", flags=os.O_WRONLY | os.O_CREAT):
    fd = os.open(path, flags, 0o644)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
"""


def program(code: str, *, given: Mapping[str, Any] | None = None) -> str:
    """Return the whole source: shared helpers, `given` as a dict, the attack, and its report."""
    encoded = json.dumps(json.dumps(dict(given or {})))
    table = dict(numbers(machine=platform.machine()))
    return (
        f"{_PRELUDE}\nNR = {table!r}\ngiven = json.loads({encoded})\n"
        f"{textwrap.dedent(code)}\nprint(json.dumps(out), flush=True)\n"
    )


async def attack(
    sbx: sb.Session, code: str, *, given: Mapping[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Run the attack in the sandbox; return its `out`."""
    options.setdefault("timeout_s", LIMIT_S)
    text = await sbx.run_code(program(code, given=given), **options)
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


async def outside(code: str, *, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Run the same program as an unconfined child of the test, as a positive control."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-I", "-c", program(code, given=given)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def outside_is_filtered() -> bool:
    """Return whether this test itself runs under a seccomp filter, which weakens controls."""
    with open("/proc/self/status", encoding="ascii") as status:
        return "Seccomp:\t2" in status.read()

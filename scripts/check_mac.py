"""Run the contract suite on a Mac, and ask the kernel what cannot be tested elsewhere.

This package has not run on a Mac yet; this is for the first person who has one:

    git clone ... && cd ... && python3 -m venv .venv && .venv/bin/pip install -e . --group dev
    .venv/bin/python -m scripts.check_mac

It takes a few minutes, changes nothing outside temporary directories, and ends with a summary to
send to the maintainers. The questions come first; each of them is a sentence of the documentation
that rests on published observations.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.portable.differences import DOCUMENTS, NONE, SANDBOX_EXEC  # noqa: E402 - the path comes first

from union import sandbox as sb  # noqa: E402 - the path comes first
from union.sandbox._system import IS_MACOS  # noqa: E402 - the path comes first

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

WHOLE = "tests/contract"
READ_ENVIRONMENT = """\
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
name = (ctypes.c_int * 3)(1, 49, int(sys.argv[1]))  # CTL_KERN, KERN_PROCARGS2
size = ctypes.c_size_t(262144)
text = ctypes.create_string_buffer(size.value)
done = libc.sysctl(name, 3, text, ctypes.byref(size), None, 0)
print("readable" if done == 0 and b"PATH=" in text.raw else "refused")
"""
TOOLS = {
    "sh": "echo ok",
    "python": "python -c 'print(\"ok\")'",
    "uv": "uv --version >/dev/null && echo ok",
    "git": "git init -q x && git -C x status --short && echo ok",
    "clang": "echo 'int main(void){return 0;}' > x.c && cc x.c -o x && ./x && echo ok",
    "make": "printf 'all:\\n\\t@echo ok\\n' > Makefile && make",
    "tar": "tar cf x.tar . && echo ok",
    "multiprocessing": "python -c 'import multiprocessing as m; m.Pool(2).map(abs, [1]); "
    'print("ok")\'',
}


async def ends_with_its_label(sbx: sb.Session) -> str:
    """A daemon that left the session must not outlive its command."""
    result = await sbx.exec(
        "python -c 'import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
        'open("pid", "w").write(str(os.getpid())); import time; time.sleep(30)\'; '
        "while [ ! -s pid ]; do sleep 0.05; done; cat pid"
    )
    pid = int(result.stdout)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "yes"
    return f"NO: process {pid} lives on"


async def hides_the_environment(sbx: sb.Session) -> str:
    """The arguments and the environment of the caller should not be readable inside."""
    await sbx.put_bytes("look.py", READ_ENVIRONMENT.encode())
    own = (await sbx.exec(f"python look.py {os.getpid()}")).stdout.strip()
    theirs = (await sbx.exec(f"python look.py {os.getppid()}")).stdout.strip()
    return f"this process: {own}, the shell that started it: {theirs}"


async def tools(sbx: sb.Session) -> str:
    """Programs that developers use start under the profile."""
    failed = []
    for name, command in TOOLS.items():
        result = await sbx.exec(command, timeout_s=60)
        if result.stdout.split()[-1:] != ["ok"]:
            failed.append(f"{name}: {result.returncode} {result.stderr.strip()[-200:]}")
    return "; ".join(failed) or f"all {len(TOOLS)} work"


async def start_time(sbx: sb.Session) -> str:
    """Median time of ``run("true")`` in milliseconds."""
    spent = []
    for _ in range(10):
        begun = time.perf_counter()
        await sbx.run("true")
        spent.append(time.perf_counter() - begun)
    return f"{sorted(spent)[5] * 1000:.1f} ms"


QUESTIONS: dict[str, Callable[[sb.Session], Awaitable[str]]] = {
    "a label ends daemons": ends_with_its_label,
    "environments are hidden (KERN_PROCARGS2)": hides_the_environment,
    "developer tools start": tools,
    "start of a command": start_time,
}


async def ask() -> dict[str, str]:
    """Put each question to a session of its own."""
    answers = {}
    for name, question in QUESTIONS.items():
        try:
            async with sb.on_device.session(backend="sandbox-exec") as sbx:
                answers[name] = await question(sbx)
        except Exception as exc:  # noqa: BLE001 - every answer counts, and the others too
            answers[name] = f"{type(exc).__name__}: {exc}"
        print(f"{name}: {answers[name]}", flush=True)
    return answers


def suite(way: str, part: str) -> dict[str, Any]:
    """Run the contract suite, or a part of it, over one backend."""
    workers = "4" if part == WHOLE else "0"
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "no:cacheprovider"]
    command += ["-p", "no:anyio", "--only-way", way, "--deselect", DOCUMENTS, part]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    failed = re.findall(r"^(?:FAILED|ERROR) tests/contract/(\S+)", done.stdout, re.MULTILINE)
    expected = {*NONE, *(SANDBOX_EXEC if way == "sandbox-exec" else ())}
    others = [name for name in failed if name.partition("[")[0] not in expected]
    last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-300:]]
    print(f"{way}: {last[0]}; unexpected: {len(others)}", flush=True)
    return {"summary": last[0], "unexpected": others}


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, test and summarise."""
    parser = argparse.ArgumentParser(prog="check_mac", description=__doc__)
    parser.add_argument("part", nargs="?", default=WHOLE, help="part of the suite")
    part = parser.parse_args(argv).part
    if not IS_MACOS:
        print(f"check_mac: this is {platform.system()}; run it on macOS", file=sys.stderr)
        return 2
    print(sb.doctor())
    found = {
        "macos": platform.mac_ver()[0],
        "machine": platform.machine(),
        "python": platform.python_version(),
        "answers": asyncio.run(ask()),
        "suites": {way: suite(way, part) for way in ("none", "sandbox-exec")},
    }
    print(json.dumps(found, indent=2))
    return 1 if any(one["unexpected"] for one in found["suites"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())

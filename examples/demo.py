"""A tour: an agent's work on a table, turn by turn, in one sandboxed session.

Everything shown really runs: the failure, the installation, the attacks. It needs no internet.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import textwrap
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator

SALES = """\
region,month,revenue
North,1,1204.50
North,2,980.00
South,1,"1,310.25"
South,2,1105.75
West,1,640.00
West,2,702.50
"""

FIRST_TRY = """\
import csv

totals = {}
for row in csv.DictReader(open("sales.csv")):
    region = row["region"]
    totals[region] = totals.get(region, 0) + float(row["revenue"])
print(totals)
"""

SECOND_TRY = """\
import csv
import json

from tinytable import bars

totals = {}
for row in csv.DictReader(open("sales.csv")):
    revenue = float(row["revenue"].replace(",", ""))
    totals[row["region"]] = totals.get(row["region"], 0) + revenue
print(bars(totals))
best = max(totals, key=totals.get)
json.dump({"best": best, "totals": totals}, open("result.json", "w"))
"""

TINYTABLE = '''\
"""Draws numbers as bars."""


def bars(values, width=24):
    most = max(values.values())
    rows = []
    for name, value in values.items():
        rows.append(f"{name:<6} {'#' * round(width * value / most):<{width}} {value:>9,.2f}")
    return "\\n".join(rows)
'''

SLOW = """\
import time
for step in range(1, 6):
    print(f"step {step} of 5", flush=True)
    time.sleep(0.2)
"""

NEW_NAMESPACE = """\
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x10000000) != 0:  # CLONE_NEWUSER
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


class Page:
    """Print the tour, with colour on a terminal and as plain text elsewhere."""

    def __init__(self) -> None:
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._turn = 0

    def _painted(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour else text

    def turn(self, title: str) -> None:
        """Print a numbered heading."""
        self._turn += 1
        print(f"\n{self._painted('1;36', f'{self._turn}. {title}')}")

    def command(self, text: str) -> None:
        """Print a command that runs inside."""
        print(self._painted("33", textwrap.indent(text.rstrip(), "   > ")))

    def output(self, text: str) -> None:
        """Print output of a command."""
        print(textwrap.indent(text.rstrip() or "(no output)", "     "), flush=True)

    def note(self, text: str) -> None:
        """Print a remark."""
        print(self._painted("2", f"   {text}"), flush=True)

    def verdict(self, text: str, *, good: bool) -> None:
        """Print whether an attack was blocked."""
        mark = self._painted("32", "blocked") if good else self._painted("1;31", "ESCAPED")
        print(f"   {mark}  {text}", flush=True)


def tiny_wheel() -> bytes:
    """Return a wheel, so that the tour needs no package index."""
    info = "tinytable-1.0.dist-info"
    files = {
        "tinytable.py": TINYTABLE,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tinytable\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={_digest(text.encode())},{len(text.encode())}\n"
        for name, text in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
    return packed.getvalue()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@contextlib.contextmanager
def host_secret() -> Iterator[tuple[str, int]]:
    """Create a secret file and a listening service on the host, as targets of the attacks."""
    with (
        tempfile.TemporaryDirectory(prefix="demo-host-") as home,
        socket.create_server(("127.0.0.1", 0)) as service,
    ):
        secret = Path(home, "secret.txt")
        secret.write_text("the host's secret\n", encoding="utf-8")
        # Positive control: both must be reachable from outside the sandbox.
        secret.read_text(encoding="utf-8")
        socket.create_connection(service.getsockname(), 3).close()
        yield str(secret), service.getsockname()[1]


async def work(sbx: sb.Session, page: Page) -> None:
    """Do the task: stage, try, fail, install, fix, fetch."""
    page.turn("The caller stages a table")
    size = await sbx.put_bytes("sales.csv", SALES.encode())
    page.note(f"put_bytes('sales.csv'): {size} bytes; the work dir lives as long as the session")

    page.turn("First try: code with a bug")
    page.command(FIRST_TRY)
    first = await sbx.exec(FIRST_TRY, script_type="python")
    page.output(first.stderr)
    page.note(f"exit code {first.returncode}: a result, not an exception")

    page.turn("The fix needs a package: a wheel is uploaded and installed")
    wheel = "tinytable-1.0-py3-none-any.whl"
    await sbx.put_bytes(wheel, tiny_wheel())
    command = f"uv pip install --offline --no-index ./{wheel}"
    page.command(command)
    installed = await sbx.exec(command, check=True)
    page.output(installed.stderr)
    page.note("into the session's own venv; the caller's packages are read-only")

    page.turn("Second try")
    page.command(SECOND_TRY)
    page.output(await sbx.run_code(SECOND_TRY))

    page.turn("The caller fetches the result")
    result = json.loads(await sbx.get_bytes("result.json"))
    page.output(json.dumps(result))


async def control(sbx: sb.Session, page: Page) -> None:
    """Show streaming, and a command that does not end."""
    page.turn("Output arrives while the program runs")
    begun = time.perf_counter()
    proc = await sbx.run(SLOW, script_type="python", stdout=sb.PIPE)
    async for line in proc.iter_stdout_lines():
        page.output(f"{time.perf_counter() - begun:4.1f} s  {line}")
    await proc.wait()

    page.turn("A timeout ends a command and all its processes")
    command = "setsid sleep 600 & echo started; while :; do sleep 1; done"
    page.command(command)
    stuck = await sbx.exec(command, timeout_s=1.0)
    page.output(stuck.stdout)
    page.note(
        f"timeout_s=1.0: back after {stuck.runtime_ms / 1000:.2f} s, exit code "
        f"{stuck.returncode}, reason '{stuck.termination_reason}'; the session stays usable"
    )


async def attacks(sbx: sb.Session, page: Page, *, secret: str, port: int) -> bool:
    """Run hostile code; return whether every attack was blocked."""
    page.turn("Hostile code is blocked")
    connect = f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)"
    elsewhere = "import socket; socket.create_connection(('192.0.2.1', 80), 3)"
    page.note("the host can read the file and reach the service; from inside:")
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    held = True
    for what, command, kind in (
        ("read a file of the host", f"cat {secret}", "shell"),
        ("read the caller's environment", 'test -n "$DEMO_API_KEY"', "shell"),
        ("connect to a service of the host", connect, "python"),
        ("connect to another machine", elsewhere, "python"),
        ("signal the calling process", f"kill -USR1 {os.getpid()}", "shell"),
        ("become root in a new namespace", NEW_NAMESPACE, "python"),
        ("change the system's programs", "echo x > /usr/bin/env", "shell"),
    ):
        tried = await sbx.exec(command, script_type=kind, timeout_s=5)
        # The pid may exist inside the sandbox too, so check whether the caller received the signal.
        refused = not received if "kill" in command else not tried.ok
        errors = tried.stderr.strip().splitlines()
        page.verdict(f"{what:<34} {errors[-1] if errors else 'not visible'}", good=refused)
        held = held and refused
    return held


async def tour(page: Page) -> bool:
    """Open one session and run the whole tour in it."""
    os.environ["DEMO_API_KEY"] = "only-for-the-caller"
    print("Opening a sandboxed session ...", flush=True)
    begun = time.perf_counter()
    async with sb.on_device.session(backend="userns") as sbx:
        opened = time.perf_counter()
        print(f"A session is open (backend '{sbx.backend}', network blocked, own work dir).")
        await work(sbx, page)
        await control(sbx, page)
        with host_secret() as (secret, port):
            held = await attacks(sbx, page, secret=secret, port=port)

        page.turn("Enforced isolation")
        page.output(str(sbx.isolation))

        page.turn("Timings")
        page.output(f"{'open, first in this process':<32} {(opened - begun) * 1000:8.1f} ms")
        page.output(await timings(sbx))
        work_dir, closing = sbx.work_dir, time.perf_counter()
    closed = time.perf_counter()
    page.output(f"{'close':<32} {(closed - closing) * 1000:8.1f} ms")
    gone = _is_gone(work_dir)
    page.note(
        f"the work dir {'is gone' if gone else 'STILL EXISTS'}; "
        f"the tour took {closed - begun:.1f} s"
    )
    return held and gone


def _is_gone(path: str) -> bool:
    return not os.path.lexists(path)


async def timings(sbx: sb.Session) -> str:
    """Return the medians of a few calls; `make bench` measures precisely."""
    rows = []
    for title, command, kind in (
        ("run 'true', isolated", "true", "shell"),
        ("run 'print(2 + 2)', isolated", "print(2 + 2)", "python"),
    ):
        taken = sorted([(await sbx.exec(command, script_type=kind)).runtime_ms for _ in range(9)])
        rows.append(f"{title:<32} {taken[len(taken) // 2]:8.1f} ms")
    return "\n".join(rows)


def main() -> int:
    """Run the tour; return 1 if this machine lacks support or an attack was not blocked."""
    page = Page()
    try:
        held = asyncio.run(tour(page))
    except sb.BackendUnavailableError as exc:
        print(f"This machine cannot open a sandbox: {exc}", file=sys.stderr)
        return 1
    if not held:
        print("\nAn attack was not blocked.", file=sys.stderr)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())

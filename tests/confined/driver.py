"""Lay baits in a container, attack them from ``landlock`` sessions, print the results as JSON.

Run as ``python -c`` in a container, with the files of the attack program in ``INSIDE`` before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from union import sandbox as sb
from union.sandbox._linux import kernel

INSIDE: dict[str, str] = globals()["INSIDE"]
OPTIONS: dict[str, Any] = globals()["OPTIONS"]
PLACE = Path(os.environ["HOME"]) / "private"
os.environ["HOST_TOKEN"] = "very-secret"
# Work dirs on the file system of the baits: no attack may fail just because they are on another.
os.environ["TMPDIR"] = f"{os.environ['HOME']}/tmp"
os.makedirs(os.environ["TMPDIR"], mode=0o755, exist_ok=True)
BAIT_PROGRAM = """
import signal, sys, time
hits = 0
def hit(*_):
    global hits
    hits += 1
signal.signal(signal.SIGUSR1, hit)
print("ready", flush=True)
sys.stdin.readline()
print(hits, flush=True)
"""
BEATS = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                open('beat', 'a').write('x'); time.sleep(0.02)
        os._exit(0)
while not os.path.exists('beat'):
    time.sleep(0.01)
"""


def serve(sock: socket.socket, reply: bytes) -> None:
    def loop() -> None:
        while True:
            try:
                peer, _ = sock.accept()
                peer.send(reply)
                peer.close()
            except OSError:
                return

    threading.Thread(target=loop, daemon=True).start()


def on_ipv6(port: int) -> socket.socket | None:
    """Serve on ::1 too; None where the container has no IPv6."""
    try:
        sock = socket.create_server(("::1", port), family=socket.AF_INET6, backlog=64)
    except OSError:
        return None
    serve(sock, b"SECRET")
    return sock


def lay_files() -> dict[str, str]:
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    PLACE.chmod(0o755)
    paths = {name: PLACE / name for name in ("secret", "victim", "victim2", "victim3", "victim4")}
    for path in paths.values():
        path.write_text("host secret")
        path.chmod(0o644)
    shutil.copy("/bin/true", PLACE / "program")
    return {**{k: str(v) for k, v in paths.items()}, "program": str(PLACE / "program")}


def intact(*, bare: bool) -> list[str]:
    """Return what of the baits was changed."""
    if bare:
        return []
    wrong = []
    for name in ("secret", "victim", "victim2", "victim3", "victim4"):
        path = PLACE / name
        if not path.exists() or path.read_text() != "host secret":
            wrong.append(f"content of {name}")
        elif path.stat().st_mode & 0o777 != 0o644 or path.stat().st_mtime < 1000:
            wrong.append(f"metadata of {name}")
    return wrong


def copy_program(work_dir: str) -> None:
    for name, text in INSIDE.items():
        (Path(work_dir) / name).write_text(text)


async def one(backend: str, network: str) -> dict[str, Any]:
    bare = backend == "none"
    files = lay_files()
    readable = PLACE.parent / "readable"
    readable.mkdir(exist_ok=True)
    (readable / "r.txt").write_text("readable")
    closed, open_ = (socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(2))
    serve(closed, b"SECRET")
    closed6 = on_ipv6(closed.getsockname()[1])
    serve(open_, b"hello")
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(PLACE / "u"))
    local.listen(5)
    (PLACE / "u").chmod(0o777)
    serve(local, b"SECRET")
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(str(PLACE / "u.d"))
    (PLACE / "u.d").chmod(0o777)
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0bait-{backend}-{network}")
    abstract.listen(5)
    serve(abstract, b"SECRET")
    env = {"TOKEN": "very-secret", "PATH": os.environ["PATH"]}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    bait = subprocess.Popen([sys.executable, "-c", BAIT_PROGRAM], env=env, **pipes)
    assert bait.stdout is not None
    assert bait.stdin is not None
    bait.stdout.readline()
    sleeper = subprocess.Popen(["sleep", "600"])
    grouped = subprocess.Popen(["sleep", "600"], start_new_session=True)
    allowed = open_.getsockname()[1] if network == "allowlist" else 0
    policy: dict[str, Any] = {"network_mode": network}
    if allowed:
        policy["network_allowlist"] = [f"127.0.0.1:{allowed}"]
    if bare:
        policy = {"network_mode": "open"}
    found: dict[str, Any] = {}
    master, device = os.openpty()
    try:
        async with (
            sb.on_device.session(backend=backend, **policy, read_only_paths=[str(readable)]) as sbx,
            sb.on_device.session(backend=backend) as other,
        ):
            found["isolation"] = sbx.isolation.to_dict()
            await sbx.put_bytes("kept", b"kept")
            await sbx.checkpoint()
            transport: Any = other._transport
            own: Any = sbx._transport
            for place in (transport.host_dir, transport._scratch.path):
                (Path(place) / "private").write_text("other secret")
            (checkpoint,) = Path(own.checkpoint_calls._state.store().path).glob("*/files")
            path = os.path.join(sbx.work_dir, "foreign.sock")
            foreign = socket.socket(socket.AF_UNIX)  # as of another run: of this session's files
            foreign.bind(path)
            foreign.listen(5)
            os.chmod(path, 0o777)
            serve(foreign, b"SECRET")
            info = {
                **files,
                "bare": bare,
                "network": {"allowlist": "filtered"}.get(network, network),
                "readable": str(readable / "r.txt"),
                "pid": bait.pid,
                "sigio_pid": sleeper.pid,
                "group": grouped.pid,
                "host": os.getpid(),
                "port": closed.getsockname()[1],
                "allowed": allowed,
                "unix": str(PLACE / "u"),
                "abstract": f"bait-{backend}-{network}",
                "other_unix": path,
                "other_work": transport.host_dir,
                "other_scratch": transport._scratch.path,
                "work": own.host_dir,
                "checkpoint": str(checkpoint),
                "terminal": os.ttyname(device),
                "has_ipv6": closed6 is not None,
            }
            copy_program(own.host_dir)
            started = time.perf_counter()
            done = await sbx.exec(
                ["python", "inside.py", json.dumps(info)], timeout_s=50, stdin=b""
            )
            found["seconds"] = round(time.perf_counter() - started, 2)
            found["stderr"] = done.stderr[-2000:]
            found["exit_code"] = done.exit_code
            found["rows"] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else []
            found["bait_alive"] = bait.poll() is None and grouped.poll() is None
            found["sigio_alive"] = sleeper.poll() is None
            found["changed"] = intact(bare=bare)
            if (checkpoint / "kept").read_bytes() != b"kept":
                found["changed"].append("a checkpoint")
            foreign.close()
            if not bare and network == "blocked":
                found["ends"] = await ends(sbx)
    finally:
        if bait.poll() is None:
            with contextlib.suppress(BrokenPipeError):
                print(file=bait.stdin, flush=True)
            found["hits"] = int(bait.stdout.readline() or -1)
        for process in (bait, sleeper, grouped):
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        for sock in (closed, open_, local, datagrams, abstract, closed6):
            if sock is not None:
                sock.close()
        os.close(master)
        os.close(device)
    return found


async def ends(sbx: sb.Session) -> dict[str, Any]:
    """Whether processes that were left behind, or that keep forking, end with their run."""
    await sbx.run_code(BEATS, timeout_s=20)
    work: Any = sbx._transport
    beat = Path(work.host_dir) / "beat"
    before = beat.stat().st_size
    await asyncio.sleep(0.2)
    quiet = beat.stat().st_size == before
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await sbx.exec(
        bomb, script_type="python", timeout_s=0.5, resources=sb.Resources(processes=200)
    )
    return {"quiet": quiet, "bomb": result.termination_reason, "left": left()}


def left() -> int:
    """Return the number of processes that still run the attack."""
    count = 0
    for pid in {*filter(str.isdigit, os.listdir("/proc"))} - {str(os.getpid())}:
        with contextlib.suppress(OSError):
            count += b"main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return count


async def main() -> dict[str, Any]:
    if "abi" in OPTIONS:
        kernel.landlock_abi = lambda: OPTIONS["abi"]  # type: ignore[assignment]
    return {name: await one(*name.split("/")) for name in OPTIONS["cases"]}


warnings.simplefilter("ignore")
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
print(json.dumps(asyncio.run(main())))

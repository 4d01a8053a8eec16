"""Untrusted plugins with limits: one correct plugin, and one for each kind of attack.

    python examples/plugin_runner.py [--backend userns]

A plugin is a Python program that reads JSON on stdin and writes JSON on stdout. Each has its own
session, with limits on memory, processes, time and output, and no network. The runner reports one
line of JSON for each plugin, whatever the plugin does.

Prints::

    {"plugin": "word_count", "ok": true, "result": {"words": 9}}
    {"plugin": "memory_hog", "ok": false, "reason": "memory"}
    {"plugin": "fork_bomb", "ok": false, "reason": "processes"}
    {"plugin": "sleeper", "ok": false, "reason": "time"}
    {"plugin": "flood", "ok": false, "reason": "output"}
    {"plugin": "thief", "ok": false, "reason": "error: FileNotFoundError"}
    {"plugin": "caller", "ok": false, "reason": "error: OSError"}
    {"plugin": "liar", "ok": false, "reason": "result is not JSON"}
    {"plugin": "wrong_shape", "ok": false, "reason": "result is not an object"}
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from typing import Any

from union import sandbox as sb

LIMITS = sb.Resources(memory="192Mi", processes=16, file_size="16Mi", tmp="16Mi")
TIMEOUT_S = 4.0
MAX_OUTPUT = 64 * 1024
AT_ONCE = 3

REQUEST = {"text": "the quick brown fox jumps over the lazy dog"}
PLUGINS = {
    "word_count": "import json, sys\n"
    "print(json.dumps({'words': len(json.load(sys.stdin)['text'].split())}))",
    "memory_hog": "hoard = [bytearray(1 << 24) for _ in range(1000)]",
    "fork_bomb": "import os, time\nwhile os.fork():\n    pass\ntime.sleep(600)",
    "sleeper": "import subprocess\nsubprocess.run(['setsid', 'sleep', '600'])",
    "flood": "while True:\n    print('x' * 1000)",
    "thief": "print(open(SECRET).read())",
    "caller": "import socket\nsocket.create_connection(('192.0.2.1', 80), 3)",
    "liar": "print('all is well')",
    "wrong_shape": "print('[1, 2, 3]')",
}


class RefusedError(Exception):
    """A plugin returned no result; the message is the reason."""


async def bounded(proc: sb.SandboxProcess) -> bytes:
    """Return the stdout of a plugin; end the plugin when it exceeds the limit.

    ``exec(max_output_bytes=...)`` is shorter, but truncates the output and lets the plugin run on.
    """
    kept = b""
    async for data in proc.iter_stdout():
        kept += data
        if len(kept) > MAX_OUTPUT:
            proc.kill()
            raise RefusedError("output")
    await proc.wait()
    return kept


def judged(proc: sb.SandboxProcess, stdout: bytes, stderr: bytes) -> dict[str, Any]:
    """Return the result. The reason of an end comes from the sandbox, the rest from the plugin."""
    ended = {"oom": "memory", "timeout": "time"}.get(proc.termination_reason)
    if ended:
        raise RefusedError(ended)
    if proc.returncode != 0:
        last = stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        # Python raises this error when the process limit is reached.
        if "BlockingIOError: [Errno 11]" in last:
            raise RefusedError("processes")
        raise RefusedError(f"error: {last.partition(':')[0][:40]}")
    try:
        result = json.loads(stdout)
    except ValueError as exc:
        raise RefusedError("result is not JSON") from exc
    if not isinstance(result, dict):
        raise RefusedError("result is not an object")
    return result


async def send_request(source: str, request: object, backend: str) -> dict[str, Any]:
    """Send one request to one plugin."""
    session = sb.on_device.session(backend=backend, resources=LIMITS, warm=0)
    async with session as sbx:
        proc = await sbx.run(
            source,
            script_type="python",
            stdin=json.dumps(request).encode(),
            stdout=sb.PIPE,
            timeout_s=TIMEOUT_S,
            max_output_bytes=MAX_OUTPUT,  # Limit of stderr, which is collected.
        )
        stdout = await bounded(proc)
        _, stderr = await proc.communicate()
        return judged(proc, stdout, stderr)


async def report(name: str, source: str, backend: str, gate: asyncio.Semaphore) -> dict[str, Any]:
    """Return the report line of one plugin."""
    async with gate:
        try:
            result = await send_request(source, REQUEST, backend)
        except RefusedError as exc:
            return {"plugin": name, "ok": False, "reason": str(exc)}
        except sb.SandboxError as exc:
            return {"plugin": name, "ok": False, "reason": f"not run: {exc.code}"}
        return {"plugin": name, "ok": True, "result": result}


def progress(text: str) -> None:
    """Print a progress line, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


async def main(backend: str) -> None:
    """Run all plugins, a few at a time, and print the reports in the order of the list."""
    gate = asyncio.Semaphore(AT_ONCE)
    with tempfile.NamedTemporaryFile(prefix="host-secret-") as secret:
        os.chmod(secret.name, 0o644)  # The sandbox stops the thief, not these permission bits.
        # The group waits for all its tasks, so after Ctrl-C every session is closed first.
        async with asyncio.TaskGroup() as group:
            reports = [
                group.create_task(
                    report(name, source.replace("SECRET", repr(secret.name)), backend, gate)
                )
                for name, source in PLUGINS.items()
            ]
            for number, coming in enumerate(reports, start=1):
                progress(f"waiting for {number} of {len(reports)}")
                result = await coming
                progress("")
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Untrusted plugins under limits.")
    parser.add_argument("--backend", default="userns", help="isolation backend (default: userns)")
    asyncio.run(main(parser.parse_args().backend))

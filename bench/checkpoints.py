"""Checkpoints of a work dir of many files, next to copies, links and git.

    python -m bench.checkpoints [--backend userns] [--files 5000] [--mib 160] [--rounds 9]

Every figure is "median (best)" in milliseconds; all ways take turns in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FILL = """\
import os
data = os.urandom(1 << 20)
for number in range({files}):
    os.makedirs(f"lib/d{{number % 500}}", exist_ok=True)
    start = number * 7919 % (len(data) - {size})
    with open(f"lib/d{{number % 500}}/f{{number}}.bin", "wb") as file:
        file.write(data[start:start + {size}])
"""


async def timed(
    samples: dict[str, list[float]], name: str, call: Callable[[], Awaitable[Any]]
) -> Any:
    """Measure one call."""
    begun = time.perf_counter()
    result = await call()
    samples.setdefault(name, []).append((time.perf_counter() - begun) * 1000)
    return result


async def command(*argv: str, cwd: str | None = None) -> None:
    """Run a program of the host."""
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    await process.wait()


async def others(samples: dict[str, list[float]], tree: str, scratch: Path) -> None:
    """Measure one round of the same by other means."""
    for name, option in (("cp -a", ()), ("hard links (cp -al)", ("-l",))):
        target = str(scratch / "copy")
        await timed(samples, name, lambda o=option, t=target: command("cp", "-a", *o, tree, t))
        await asyncio.to_thread(shutil.rmtree, target)
    work = str(scratch / "git")
    await command("sh", "-c", "date +%N > touched", cwd=work)
    await timed(samples, "git stash -u", lambda: command("git", "stash", "-u", cwd=work))
    await timed(samples, "git stash pop", lambda: command("git", "stash", "pop", cwd=work))


async def main(options: argparse.Namespace) -> None:
    """Measure and print a table."""
    samples: dict[str, list[float]] = {}
    size = options.mib * (1 << 20) // options.files
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        scratch = Path(name)
        async with sb.on_device.session(backend=options.backend) as session:
            await session.run_code(FILL.format(files=options.files, size=size))
            await session.download(".", scratch / "git")
            identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
            for step in (("init",), ("add", "-A", "-f"), ("commit", "-m", "base")):
                await command("git", *identity, *step, cwd=str(scratch / "git"))
            source = str(scratch / "git" / "lib")
            first = await timed(samples, "first checkpoint", session.checkpoint)
            for number in range(options.rounds):
                await session.put_bytes("changed", str(number).encode())
                kept = await timed(samples, "checkpoint", session.checkpoint)
                await timed(samples, "next command", lambda: session.exec("true"))
                await timed(samples, "rollback", lambda k=kept: session.rollback(k))
                await timed(samples, "diff", lambda: session.diff(first))
                fork = await timed(samples, "fork, opened", lambda k=kept: k.fork().open())
                await fork.close()
                if number % 3 == 0:
                    many = await timed(samples, "16 forks, opened", lambda k=kept: k.fork_many(16))
                    await asyncio.gather(*(one.close() for one in many))
                    await others(samples, source, scratch)
            print(f"{options.files} files, {options.mib} MiB, {session.isolation.layers}")
    copy = statistics.median(samples["cp -a"])
    for name, values in samples.items():
        middle = statistics.median(values)
        print(f"{name:22} {middle:9.1f} ({min(values):.1f})  {middle / copy:7.3f} of cp -a")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="userns")
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--mib", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=9)
    asyncio.run(main(parser.parse_args()))

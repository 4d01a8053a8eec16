"""Checkpoints of a work dir with numpy and pandas, next to copies, links and git.

    python -m bench.checkpoints [--backend userns] [--rounds 9] [--layers 64]

Every figure is "median (best)" in milliseconds; all ways take turns in one process. The packages
are those of the Python that runs this. They are compiled first: compiling takes longer than any
file call. A file beside them changes in every layer. Targets: a checkpoint and a rollback at most
0.01 of ``cp -a``, 16 forks at once at most 0.2, an import on 64 layers within 1.05 of a plain
directory.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
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

PACKAGES = ("numpy", "pandas", "dateutil", "pytz", "tzdata", "six")
IMPORTS = 3
"""Imports after each checkpoint; the first one finds an empty cache of names."""
IMPORT = "import numpy, pandas; print(pandas.__file__)"
Samples = dict[str, list[float]]


def packages(target: Path) -> None:
    """Copy the installed packages and their libraries to a directory."""
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:
            continue
        origin = Path(found.origin)
        if origin.name != "__init__.py":
            shutil.copy2(origin, target)
            continue
        place = origin.parent
        for each in (place, place.with_name(f"{name}.libs")):
            if each.is_dir():
                shutil.copytree(each, target / each.name, symlinks=True)


async def timed(samples: Samples, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
    """Measure one call."""
    begun = time.perf_counter()
    result = await call()
    samples.setdefault(name, []).append((time.perf_counter() - begun) * 1000)
    return result


async def command(*argv: str, cwd: str | None = None) -> int:
    """Run a program of the host."""
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return await process.wait()


async def copies(samples: Samples, tree: str, scratch: Path) -> None:
    """Measure one round of the same by copies of the host."""
    for name, option in (
        ("cp -a", "--reflink=never"),
        ("hard links (cp -al)", "-l"),
        ("reflink (cp --reflink)", "--reflink=always"),
    ):
        target = str(scratch / "copy")
        begun = time.perf_counter()
        if await command("cp", "-a", option, tree, target) == 0:
            samples.setdefault(name, []).append((time.perf_counter() - begun) * 1000)
        await asyncio.to_thread(shutil.rmtree, target, ignore_errors=True)


async def stashes(samples: Samples, work: str) -> None:
    """Measure one round of git."""
    await command("sh", "-c", "date +%N > touched", cwd=work)
    await timed(samples, "git stash -u", lambda: command("git", "stash", "-u", cwd=work))
    await timed(samples, "git stash pop", lambda: command("git", "stash", "pop", cwd=work))


async def imported(samples: Samples, name: str, session: sb.Session) -> None:
    """Measure the processor time of an import in a new Python."""
    result = await session.exec(
        ["python3", "-B", "-c", IMPORT], env={"PYTHONPATH": f"{session.work_dir}/lib"}, check=True
    )
    assert result.stdout.startswith(session.work_dir), result.stdout
    samples.setdefault(name, []).append(result.usage.cpu_s * 1000)


async def compiled(session: sb.Session) -> None:
    """Compile the packages, whose files are newer than those that they were copied from."""
    await session.exec(["python3", "-m", "compileall", "-q", "lib"])


async def deepened(session: sb.Session, layers: int) -> None:
    """Take checkpoints until the work dir has this many layers."""
    for number in range(layers - 1):
        await session.put_bytes("lib/changed", str(number).encode())
        await session.checkpoint()


async def measure(options: argparse.Namespace, scratch: Path) -> Samples:
    """Return all figures."""
    samples: Samples = {}
    source = scratch / "git" / "lib"
    source.mkdir(parents=True)
    packages(source)
    work = str(scratch / "git")
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@localhost")
    for step in (("init",), ("add", "-A", "-f"), ("commit", "-m", "base")):
        await command("git", *identity, *step, cwd=work)
    opened = sb.on_device.session
    async with opened(backend=options.backend) as session, opened(backend=options.backend) as plain:
        for each in (session, plain):
            await each.upload(source, "lib")
            await compiled(each)
        first = await timed(samples, "first checkpoint", session.checkpoint)
        for number in range(options.rounds):
            await session.put_bytes("changed", str(number).encode())
            kept = await timed(samples, "checkpoint", session.checkpoint)
            await timed(samples, "next command", lambda: session.exec("true"))
            await timed(samples, "command after it", lambda: session.exec("true"))
            await timed(samples, "rollback", lambda k=kept: session.rollback(k))
            await timed(samples, "diff", lambda: session.diff(first))
            fork = await timed(samples, "fork, opened", lambda k=kept: k.fork().open())
            await fork.close()
            if number % 3 == 0:
                many = await timed(samples, "16 forks, opened", lambda k=kept: k.fork_many(16))
                await asyncio.gather(*(one.close() for one in many))
                await copies(samples, str(source), scratch)
        await stashes(samples, work)
        await deepened(session, options.layers)
        for _ in range(options.rounds):
            for _ in range(IMPORTS):
                await imported(samples, "import, plain", plain)
                await imported(samples, f"import, {options.layers} layers", session)
            await timed(samples, f"checkpoint, {options.layers} layers", session.checkpoint)
        files = sum(1 for path in source.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        print(f"{files} files, {size / 2**20:.0f} MiB, {session.isolation.layers}")
    return samples


def report(samples: Samples, layers: int) -> None:
    """Print a table."""
    copy = statistics.median(samples["cp -a"])
    for name, values in samples.items():
        middle = statistics.median(values)
        print(f"{name:24} {middle:9.1f} ({min(values):.1f})  {middle / copy:7.3f} of cp -a")
    plain, deep = (samples[f"import, {kind}"] for kind in ("plain", f"{layers} layers"))
    ratio = statistics.median(b / a for a, b in zip(plain, deep, strict=True))
    least = min(deep) / min(plain)
    print(f"import on {layers} layers: {ratio:.3f} of plain (median of pairs), {least:.3f} (best)")


def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="bench-checkpoints-") as name:
        report(asyncio.run(measure(options, Path(name))), options.layers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="userns")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=64)
    main(parser.parse_args())

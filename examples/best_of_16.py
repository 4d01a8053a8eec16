"""Sixteen attempts to repair a program, each in a fork of one prepared session.

    python examples/best_of_16.py [--backend userns]

The set-up is done once. Each fork gets another patch, as a model would write them, and runs the
tests. The work dir of the fork that passes most of them becomes that of the session.

Prints::

    16 forks of one checkpoint
    passed: 0 0 1 1 2 2 2 2 2 2 2 2 2 2 2 3
    kept attempt 7, which passes 3 of 3
    changed median.py
"""

from __future__ import annotations

import argparse
import asyncio

from union import sandbox as sb

PROGRAM = "def median(values):\n    return values[len(values) // 2]\n"
TESTS = """\
from median import median

cases = [([3, 1, 2], 2), ([5], 5), ([4, 1, 3, 2], 2.5)]
passed = 0
for values, wanted in cases:
    try:
        passed += median(values) == wanted
    except Exception:
        pass
print(passed)
"""
BODIES = [
    "return None",
    "return values[0]",
    "return values[-1]",
    "return sorted(values)[0]",
    "return sorted(values)[len(values) // 2]",
    "return sorted(values)[(len(values) - 1) // 2]",
    "raise ValueError(values)",
    "v = sorted(values); n = len(v); return (v[(n - 1) // 2] + v[n // 2]) / 2",
]


def patch(attempt: int) -> bytes:
    """Return the program of one attempt."""
    body = BODIES[attempt] if attempt < len(BODIES) else BODIES[4 + attempt % 2]
    return f"def median(values):\n    {body}\n".encode()


async def score(fork: sb.Session, attempt: int) -> int:
    """Apply one patch in its fork and return how many tests pass."""
    await fork.put_bytes("median.py", patch(attempt))
    result = await fork.exec("python tests.py", timeout_s=30)
    return int(result.stdout) if result.ok else 0


async def main(backend: str) -> None:
    """Set up once, try sixteen patches, keep the best."""
    async with sb.on_device.session(backend=backend) as session:  # type: ignore[arg-type]
        await session.put_bytes("median.py", PROGRAM.encode())
        await session.put_bytes("tests.py", TESTS.encode())
        ready = await session.checkpoint("set up")
        forks = await ready.fork_many(16)
        try:
            print(f"{len(forks)} forks of one {type(ready).__name__.lower()}")
            passed = await asyncio.gather(*(score(one, n) for n, one in enumerate(forks)))
            print("passed:", *sorted(passed))
            best = max(range(len(forks)), key=passed.__getitem__)
            await session.adopt(forks[best])
        finally:
            await asyncio.gather(*(one.close() for one in forks))
        print(f"kept attempt {best}, which passes {passed[best]} of 3")
        for change in await session.diff(ready):
            if not change.path.startswith("__pycache__"):
                print(change.action, change.path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="bubblewrap")
    asyncio.run(main(parser.parse_args().backend))

"""The allocator setting keeps freed memory in the process."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# The setting holds for the whole process and cannot be undone, so the test runs it in another one.
PROGRAM = """
    import resource
    import sys

    from union.sandbox.server._allocator import retain_freed_memory

    MIB = 1 << 20

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(50):
            held = [b"x" * (MIB // 4) for _ in range(4)]
            del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    before = faults()
    kept = retain_freed_memory(4 * MIB)
    faults()
    print(kept, before, faults())
"""


def test_freed_memory_is_retained() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], check=True, capture_output=True, text=True
    )
    kept, before, after = done.stdout.split()
    assert kept == "True"
    assert int(before) > 1000, "50 MiB were allocated and freed, which is 12,800 pages"
    assert int(after) < 100

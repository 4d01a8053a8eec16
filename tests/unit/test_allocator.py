"""What a server has freed stays with it for the next piece."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# In a process of its own: it holds for all of it, and cannot be taken back.
PROGRAM = """
    import resource
    import sys

    from union.sandbox.server._allocator import keep_freed

    MIB = 1 << 20

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(50):
            held = [b"x" * (MIB // 4) for _ in range(4)]
            del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    before = faults()
    kept = keep_freed(4 * MIB)
    faults()
    print(kept, before, faults())
"""


def test_freed_memory_is_kept() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], check=True, capture_output=True, text=True
    )
    kept, before, after = done.stdout.split()
    assert kept == "True"
    assert int(before) > 1000, "50 MiB came and went, which is 12,800 pages"
    assert int(after) < 100

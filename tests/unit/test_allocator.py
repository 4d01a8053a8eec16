"""What a server has freed stays with it for the next piece, and goes back when it is much."""

from __future__ import annotations

import subprocess
import sys
import textwrap

# In a process of its own: it holds for all of it, and cannot be taken back.
PROGRAM = """
    import resource
    import sys
    from pathlib import Path

    from union.sandbox._linux.allocator import keep_freed

    MIB = 1 << 20

    def pages():
        return int(Path("/proc/self/statm").read_text().split()[1])

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(50):
            held = [b"x" * (MIB // 4) for _ in range(4)]
            del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    kept = keep_freed(4 * MIB)
    faults()
    again = faults()
    before = pages()
    held = [b"x" * (MIB // 2) for _ in range(256)]
    most = pages() - before
    del held
    print(kept, again, most * 4096 > 100 * MIB, (pages() - before) * 4096 < 16 * MIB)
"""


def test_freed_memory_is_kept_up_to_a_limit() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], check=True, capture_output=True, text=True
    )
    kept, again, was_much, went_back = done.stdout.split()
    assert (kept, was_much, went_back) == ("True", "True", "True")
    assert int(again) < 100, "50 MiB came and went, which is 12,800 pages"

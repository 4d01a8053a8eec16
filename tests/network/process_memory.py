"""Search the memory of processes."""

from __future__ import annotations

from pathlib import Path

MAX_REGION = 64 * 1024 * 1024


def holders_of(needle: bytes, pids: set[int]) -> tuple[set[int], int]:
    """Return the processes whose writable memory has ``needle``, and how many were searched."""
    found, searched = set(), 0
    for pid in pids:
        try:
            regions = Path(f"/proc/{pid}/maps").read_text().splitlines()
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                if any(needle in data for data in _contents(memory, regions)):
                    found.add(pid)
                searched += bool(regions)
        except OSError:
            continue  # it has ended
    return found, searched


def _contents(memory, regions):
    for region in regions:
        bounds, mode, *_ = region.split()
        begin, end = (int(text, 16) for text in bounds.split("-"))
        if "w" not in mode or end - begin > MAX_REGION:
            continue
        try:
            memory.seek(begin)
            yield memory.read(end - begin)
        except (OSError, OverflowError, ValueError):
            continue  # a region of the kernel, or one that was unmapped

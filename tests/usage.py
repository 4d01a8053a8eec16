"""A plugin of pytest that records what each test takes: ``REPORTS=directory make test`` loads it.

Each process of pytest appends to a file of its own, one line of JSON a test: seconds of the clock,
and seconds of processors in this process and all below it. ``python -m scripts.usage`` adds up.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator

TICKS = os.sysconf("SC_CLK_TCK")


def processor_seconds() -> float:
    """Seconds of this process, of the processes below it, and of those they have waited for."""
    total = sum(os.times()[:4])
    for pid in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # It ended meanwhile: its parent has its time.
        total += sum(map(int, fields[11:15])) / TICKS
    return total


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure the test with its set-up and teardown."""
    begun, used = time.monotonic(), processor_seconds()
    result = yield
    line = {
        "run": os.environ.get("REPORTS_RUN", ""),
        "test": item.nodeid,
        "at": begun,
        "wall": round(time.monotonic() - begun, 3),
        "cpu": round(processor_seconds() - used, 3),
    }
    with Path(os.environ["REPORTS"], f"usage-{os.getpid()}.jsonl").open("a") as output:
        output.write(json.dumps(line) + "\n")
    return result

"""A program whose loop ends while sessions are open, at work or closing leaves nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest
from tests.conftest import ISOLATED, session_of

PROGRAM = """
import asyncio, os, sys
from union import sandbox as sb

async def one():
    async with sb.on_device.session(backend=sys.argv[1], warm=0) as sbx:
        await sbx.exec("true")

async def main():
    tasks = [asyncio.create_task(one()) for _ in range(12)]
    # Then some are done, some close, some run and some are opened; asyncio.run cancels them all.
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

asyncio.run(main())
own = f"sandbox-{os.getpid()}-"
places = [place for place in ("/tmp", "/var/tmp") if os.path.isdir(place)]
print([name for place in places for name in os.listdir(place) if name.startswith(own)])
"""


@pytest.mark.spec("B2", "G4")
@pytest.mark.parametrize("backend", ISOLATED)
def test_no_work_dir_is_left(backend: str) -> None:
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, backend],
            check=False,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


async def test_a_close_that_is_cancelled_before_its_first_step_is_a_close() -> None:
    """What asyncio.run does at its end to whatever task there is, at the worst moment."""
    session = await session_of("userns", warm=0).open()
    closing = asyncio.create_task(session.close())
    await asyncio.sleep(0)  # its own task is made, and has not begun
    lifecycle: Any = session._lifecycle
    assert lifecycle.closing is not None
    lifecycle.closing.cancel()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not os.path.exists(session.work_dir)

"""Where isolation is unavailable, open() raises with cause and remedy; there is no fallback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ISOLATED

from union import sandbox as sb
from union.sandbox._linux import kernel
from union.sandbox._seccomp.filter import filter_program

PROJECT = Path(__file__).parents[2]

# A process under our own filter stands for one in a container whose profile refuses user
# namespaces: the same calls are refused.
CONFINED = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from tests.unit.seccomp_probe import install
from union import sandbox as sb
install(bytes.fromhex(sys.argv[1]))
async def main():
    try:
        await sb.on_device.session(backend=sys.argv[3]).open()
    except sb.BackendUnavailableError as error:
        print(error.backend, error.code)
        print(error)
asyncio.run(main())
"""


@pytest.mark.threat(114)
@pytest.mark.spec("G1")
@pytest.mark.parametrize("backend", ISOLATED)
def test_missing_user_namespaces_are_reported_with_remedies(backend: str) -> None:
    program = filter_program(machine=kernel.machine()).hex()
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, program, str(PROJECT), backend],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.stdout.startswith(f"{backend} backend-unavailable\n"), done.stderr
    assert "seccomp profile refuses user namespaces" in done.stdout
    assert "hint:" in done.stdout
    assert "seccompProfile: Unconfined" in done.stdout


@pytest.mark.threat(114)
@pytest.mark.spec("G1")
@pytest.mark.parametrize("backend", ISOLATED)
async def test_control_the_session_opens_without_the_filter(backend: str) -> None:
    async with sb.on_device.session(backend=backend) as session:
        assert (await session.exec("echo fine")).stdout == "fine\n"

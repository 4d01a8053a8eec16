"""A session is found again by the name of its run, after its owner has crashed."""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import flyte
import flyte.remote
import pytest
from tests.plane.sandboxes import LONG_S, phase, sandbox_plane, settled

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.plane.plane import Plane

pytestmark = [pytest.mark.timeout(120), pytest.mark.spec("P7")]
LEASE_S = 3.0


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with sandbox_plane() as plane:
        yield plane


@pytest.fixture(autouse=True)
def every_run_is_over(request) -> Iterator[None]:
    yield
    if "plane" in request.fixturenames:
        settled(request.getfixturevalue("plane"))


OWNER = """
import asyncio, sys
import flyte
from union import sandbox as sb

async def main():
    flyte.init(endpoint=sys.argv[1], insecure=True, org="stand-in", project="testing",
               domain="development")
    lease = float(sys.argv[3]) if sys.argv[3:] else None
    sbx = await sb.session(name=sys.argv[2], timeout=600, owner_lease=lease, env={"OF": "owner"},
                           network_mode="allowlist", network_allowlist=["example.org"])
    await sbx
    await sbx.exec("echo kept > file")
    print("serving", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def crashed_owner(plane: Plane, name: str, *lease: str) -> None:
    """Start a session in another process, which is killed when the session is ready."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, plane.endpoint, name, *lease],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as owner:
        assert owner.stdout is not None
        try:
            line = await asyncio.wait_for(asyncio.to_thread(owner.stdout.readline), LONG_S)
            assert line == b"serving\n"
        finally:
            owner.kill()


async def test_a_caller_that_crashed_finds_its_session_and_owns_it(plane: Plane):
    await crashed_owner(plane, "crashed")
    async with asyncio.timeout(LONG_S):
        sbx = await sb.attach("crashed")
        assert (sbx.name, sbx.is_owner) == ("crashed", True)
        await sbx
        assert sbx.ip == plane.pod("crashed").ip
        assert (await sbx.exec("cat file; echo $OF")).stdout == "kept\nowner\n"
        assert (sbx.network_mode, sbx.network_allowlist) == ("allowlist", ["example.org"])
        assert (sbx.environment, sbx.sandbox_mode) == ("union-sandbox", "userns")
        assert 0 < (sbx.expires_at - sbx.created_at).total_seconds() <= 600
        reference = pickle.loads(pickle.dumps(sbx))
        assert (await reference.exec("cat file")).stdout == "kept\n"
        assert not reference.is_owner
        await sbx.close()
    assert phase(plane, "crashed") in {"ABORTED", "SUCCEEDED"}
    with pytest.raises(sb.SessionClosedError, match="the run crashed has ended"):
        await sb.attach("crashed")


async def test_the_lease_continues_with_the_new_owner(plane: Plane):
    await crashed_owner(plane, "leased-again", str(LEASE_S))
    async with asyncio.timeout(LONG_S), sb.attach("leased-again") as sbx:
        begun = time.monotonic()
        while time.monotonic() < begun + 2 * LEASE_S:
            await asyncio.sleep(0.1)
        assert not plane.action("leased-again").is_over
        assert (await sbx.exec("cat file")).stdout == "kept\n"


async def test_code_that_blocks_the_event_loop_does_not_lose_the_lease(plane: Plane):
    async with asyncio.timeout(LONG_S), sb.session(name="blocking", owner_lease=LEASE_S) as sbx:
        assert (await sbx.exec("echo hello")).stdout == "hello\n"
        time.sleep(2 * LEASE_S)  # The mistake that is tested.
        assert not plane.action("blocking").is_over
        assert (await sbx.exec("echo hello")).stdout == "hello\n"


async def test_a_session_has_a_lease_unless_it_opts_out(plane: Plane):
    plane.faults.start_delay_s = LONG_S
    leases = {}
    for name, options in (("with-lease", {}), ("detached", {"owner_lease": None})):
        sbx = await sb.session(name=name, **options)
        run = await flyte.remote.Run.get.aio(name=name)
        leases[name] = json.loads((await run.inputs.aio())["session"]).get("owner_lease")
        await sbx.close()
    assert leases == {"with-lease": [300.0, 300.0], "detached": None}


async def test_another_key_opens_nothing(plane: Plane, monkeypatch, own_home: Path):
    plane.faults.start_delay_s = LONG_S
    sbx = await sb.session(name="of-another")
    try:
        monkeypatch.setenv("UNION_SANDBOX_ATTACH_KEY", "k" * 32)
        with pytest.raises(sb.SandboxUsageError, match="another attach key") as caught:
            await sb.attach("of-another")
        assert caught.value.code == "attach-key"
        monkeypatch.delenv("UNION_SANDBOX_ATTACH_KEY")
        (own_home / ".local/state/union-sandbox/attach-key").unlink()
        with pytest.raises(sb.SandboxUsageError, match="there is no attach key") as caught:
            await sb.attach("of-another")
        assert "UNION_SANDBOX_ATTACH_KEY" in caught.value.hint
        monkeypatch.setenv("UNION_SANDBOX_ATTACH_KEY", "short")
        with pytest.raises(sb.SandboxUsageError, match="at least 32 characters, got 5"):
            await sb.attach("of-another")
    finally:
        await sbx.close()


async def test_a_key_in_the_variable_serves_every_machine(plane: Plane, monkeypatch, own_home):
    monkeypatch.setenv("UNION_SANDBOX_ATTACH_KEY", "k" * 32)
    plane.faults.start_delay_s = LONG_S
    sbx = await sb.session(name="by-variable")
    assert not (own_home / ".local").exists()
    again = await sb.attach("by-variable")
    assert again.is_owner
    await again.close()
    await sbx.close()


async def test_a_run_that_is_no_session_is_refused(plane: Plane):
    import plane_sessions

    run = await flyte.with_runcontext(mode="remote").run.aio(plane_sessions.opens, name="inner")
    with pytest.raises(sb.SandboxError) as caught:
        await sb.attach(run.name)
    assert caught.value.code in {"no-session", "closed"}, "unless it has ended already"
    await run.wait.aio(quiet=True)
    with pytest.raises(sb.SandboxExecutionError, match="the run nonesuch"):
        await sb.attach("nonesuch")

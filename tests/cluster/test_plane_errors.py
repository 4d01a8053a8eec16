"""Errors of the control plane arrive as errors of this package, with a remedy."""

from __future__ import annotations

import asyncio
import datetime as dt
from typing import TYPE_CHECKING

import flyte
import flyte._initialize
import pytest
from tests.plane.sandboxes import LONG_S, sandbox_plane, settled

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.plane.plane import Plane

pytestmark = [pytest.mark.spec("I4", "D8"), pytest.mark.timeout(120)]


@pytest.fixture
def dead_plane() -> Iterator[None]:
    flyte.init(endpoint="http://127.0.0.1:9", insecure=True, project="p", domain="d")
    yield
    # There is no public way back to a process that was never initialised.
    flyte._initialize._init_config = None


@pytest.mark.usefixtures("dead_plane")
async def test_a_control_plane_that_cannot_be_reached_is_named():
    async with asyncio.timeout(LONG_S):
        with pytest.raises(sb.SandboxExecutionError, match="could not be submitted") as caught:
            await sb.session()
    assert (caught.value.code, caught.value.stage) == ("control-plane", "transport")
    assert "endpoint" in caught.value.hint


@pytest.mark.usefixtures("dead_plane")
async def test_a_reference_that_needs_the_control_plane_fails_the_same_way():
    now = dt.datetime.now(dt.UTC)
    reference = sb.SandboxSession(
        name="sbx-nowhere", created_at=now, expires_at=now + dt.timedelta(hours=1)
    )
    async with asyncio.timeout(LONG_S):
        with pytest.raises(sb.SandboxExecutionError, match="sbx-nowhere") as caught:
            await reference.exec("true")
    assert caught.value.code == "control-plane"


@pytest.fixture(scope="module")
def plane() -> Iterator[Plane]:
    with sandbox_plane() as plane:
        yield plane


async def test_a_client_that_raises_anything_is_wrapped(plane: Plane, monkeypatch):
    async def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr("flyte.remote._task.LazyEntity.fetch", type("F", (), {"aio": broken}))
    with pytest.raises(sb.SandboxExecutionError, match="out of order") as caught:
        await sb.session()
    assert caught.value.code == "control-plane"
    settled(plane)


async def test_the_service_account_of_a_session_reaches_the_run(plane: Plane):
    async with asyncio.timeout(LONG_S), sb.session(service_account="robot", name="robot") as sbx:
        assert (await sbx.exec("echo hello")).stdout == "hello\n"
        asked = next(run.spec for key, run in plane.state.runs.items() if key[2] == "robot")
        assert asked.security_context.run_as.k8s_service_account == "robot"
    settled(plane)


async def test_a_cluster_is_used_without_a_warning_and_satisfies_local_false(plane: Plane):
    async with asyncio.timeout(LONG_S), sb.session(local=False, name="required") as sbx:
        assert sbx.ip == plane.pod("required").ip
    settled(plane)

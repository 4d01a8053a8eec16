"""Tasks that are called as plain functions: a child gets a reference, and closes only that."""

from __future__ import annotations

import asyncio
import copy
import time

import flyte
import pytest
from tests.conftest import SOON_S

from union import sandbox as sb
from union.sandbox.cluster import _plain_calls
from union.sandbox.errors import SandboxConnectionError

pytestmark = [pytest.mark.spec("I5"), pytest.mark.timeout(60)]
env = flyte.TaskEnvironment(name="plain-calls")


@env.task
async def child(sbx: sb.SandboxSession, script: str) -> str:
    assert not sbx.is_owner
    out = (await sbx.exec(script)).stdout
    await sbx.close()
    return out


@env.task
async def child_of_many(many: list[sb.SandboxSession]) -> list[bool]:
    owners = [sbx.is_owner for sbx in many]
    for sbx in many:
        await sbx.close()
    return owners


@env.task
async def parent() -> list[str]:
    async with sb.session(local=True) as sbx:
        found = await asyncio.gather(child(sbx, "echo one"), child(sbx, "echo two"))
        found.append(await child(sbx=sbx, script="echo three"))
        found.append(str(await child_of_many([sbx, sbx])))
        found.append((await sbx.exec("echo still here")).stdout)
        return found


@pytest.mark.threat(175)
def test_a_child_closes_only_its_own_connection():
    found = asyncio.run(parent())
    assert found == ["one\n", "two\n", "three\n", "[False, False]", "still here\n"]


@pytest.mark.threat(175)
async def test_the_owners_session_would_end_without_the_reference():
    """Positive control: any function that closes the owner's own session ends it."""
    async with sb.session(local=True) as sbx:
        reference = _plain_calls._passed(sbx)
        assert reference is not sbx
        assert not reference.is_owner
        await reference.exec("true")
        await reference.close()
        assert (await sbx.exec("echo on")).stdout == "on\n"
        await sbx.close()
        with pytest.raises(sb.SessionClosedError):
            await sbx.exec("true")


async def test_other_arguments_are_passed_unchanged():
    values = [1, "x", [1, 2], (3,), {"a": 1}, None, object()]
    assert all(_plain_calls._passed(value) is value for value in values)
    async with sb.session(local=True) as sbx:
        passed = _plain_calls._passed({"a": [sbx], "b": (1, sbx)})
        assert not passed["a"][0].is_owner
        assert not passed["b"][1].is_owner
        assert passed["b"][0] == 1


async def test_the_wrapper_is_installed_once():
    for _ in range(3):
        sb.session(local=True).close()
    from flyte._task import AsyncFunctionTaskTemplate

    assert not hasattr(AsyncFunctionTaskTemplate.forward.__wrapped__, "__wrapped__")


# References to sessions that have ended.


@pytest.mark.spec("I2")
async def test_a_reference_to_a_closed_session_fails_at_once_and_leaves_nothing(recwarn):
    async with sb.session(local=True) as sbx:
        reference = copy.copy(sbx)
        assert (await copy.copy(sbx).exec("true")).ok, "the control"
    begun = time.monotonic()
    for call in (reference.exec("true"), reference.put_bytes("x", b""), reference.list_dir(".")):
        with pytest.raises(SandboxConnectionError) as caught:
            await call
        assert "has ended" in caught.value.hint
    assert time.monotonic() - begun < SOON_S
    assert reference._transport._http is None, "no connection pool is left"
    del reference
    await asyncio.sleep(0)
    assert [str(w.message) for w in recwarn if "nclosed" in str(w.message)] == []


@pytest.mark.spec("I2")
async def test_a_reference_to_a_pod_that_is_gone_fails_in_seconds():
    async with sb.session(local=True) as sbx:
        gone = copy.copy(sbx)
        gone.endpoint = f"https://127.0.0.1:9#sha256={'0' * 64}"
        begun = time.monotonic()
        with pytest.raises(SandboxConnectionError) as caught:
            await gone.exec("true")
        assert time.monotonic() - begun < SOON_S
        assert "has ended" in caught.value.hint
        assert gone._transport._http is None

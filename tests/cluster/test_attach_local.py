"""Attaching without a cluster: a session is found in the process that has started it."""

from __future__ import annotations

import asyncio

import pytest

from union import sandbox as sb

pytestmark = pytest.mark.spec("P7")
LONG_S = 40.0


async def test_without_a_cluster_a_session_is_found_in_its_own_process():
    async with asyncio.timeout(LONG_S), sb.session(local=True, name="mine") as sbx:
        await sbx.exec("echo kept > file")
        again = await sb.attach("mine")
        assert again.is_owner
        assert (await again.exec("cat file")).stdout == "kept\n"
        assert (await sbx.exec("cat file")).stdout == "kept\n"
        await again.close()
        with pytest.raises(sb.SandboxError):
            await sbx.exec("true")
    with pytest.raises(sb.SandboxUsageError, match="no session 'mine' in this process") as caught:
        await sb.attach("mine")
    assert caught.value.code == "no-session"


@pytest.mark.parametrize("name", ["", "Upper", "x" * 31, None, 1])
def test_names_are_checked_before_anything_is_asked(name):
    with pytest.raises(sb.SandboxUsageError, match="name must be"):
        sb.attach(name)

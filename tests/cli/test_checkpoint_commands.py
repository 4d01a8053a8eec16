"""``sbx checkpoint``, ``rollback``, ``diff`` and ``fork`` on a session of a server."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.tool import sbx
from tests.conftest import SERVED, session_of
from tests.servers import shared_server

if TYPE_CHECKING:
    import subprocess

    from union import sandbox as sb


async def tool(
    session: sb.Session, verb: str, *words: str, token: str | None = ""
) -> subprocess.CompletedProcess[str]:
    server = shared_server(SERVED)
    env = {**os.environ, "SANDBOX_SERVER_TOKEN": server.token or ""}
    if token is None:
        del env["SANDBOX_SERVER_TOKEN"]
    reach = ("--endpoint", server.endpoint, "--id", session.id)
    return await asyncio.to_thread(sbx, verb, *reach, *words, env=env)


async def answer(session: sb.Session, verb: str, *words: str) -> Any:
    done = await tool(session, verb, "--json", *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.spec("L1")
async def test_keep_compare_and_return() -> None:
    async with session_of("remote-userns") as session:
        await session.put_bytes("a.txt", b"one\n")
        taken = await tool(session, "checkpoint", "before")
        assert taken.returncode == 0, taken.stderr
        identity = taken.stdout.strip()
        (listed,) = await answer(session, "checkpoint", "--list")
        assert (listed["id"], listed["name"]) == (identity, "before")
        await session.exec("echo two >> a.txt; printf 'x\\033[2J' > $(printf 'b\\033')", check=True)
        shown = await tool(session, "diff", "before")
        assert shown.stdout == "M a.txt\nA b\ufffd\n"
        text = (await tool(session, "diff", "--text", identity)).stdout
        assert "+two" in text
        assert "\033" not in text
        assert (await answer(session, "diff", "before"))[0]["path"] == "a.txt"
        assert await answer(session, "rollback", "before") == {"rolled_back": identity}
        assert await session.get_bytes("a.txt") == b"one\n"
        assert (await tool(session, "checkpoint", "--drop", identity)).returncode == 0
        missing = await tool(session, "rollback", "before")
        assert missing.returncode == 2
        assert "no such checkpoint" in missing.stderr


@pytest.mark.spec("L1")
async def test_a_command_in_a_fork() -> None:
    async with session_of("remote-userns") as session:
        await session.put_bytes("a.txt", b"one\n")
        await session.checkpoint("start")
        failed = await tool(
            session, "fork", "--adopt", "start", "--", "sh", "-c", "cat a.txt; echo n > n; exit 3"
        )
        assert (failed.returncode, failed.stdout) == (3, "one\n")
        assert "1 changes, discarded" in failed.stderr
        assert [info.path for info in await session.list_dir(".")] == ["a.txt"]
        words = ("--adopt", "start", "--", "sh", "-c", "echo two > a.txt")
        kept = await answer(session, "fork", *words)
        assert kept["adopted"] is True
        assert [one["path"] for one in kept["changes"]] == ["a.txt"]
        assert await session.get_bytes("a.txt") == b"two\n"


@pytest.mark.spec("L4")
async def test_a_token_is_needed() -> None:
    async with session_of("remote-userns") as session:
        refused = await tool(session, "checkpoint", "--json", token=None)
        assert refused.returncode == 125
        assert json.loads(refused.stdout)["error"]["code"] == "unauthorized"

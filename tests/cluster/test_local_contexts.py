"""Contexts in sessions of a Flyte run: the same interpreter, keys and ends, in a local process."""

from __future__ import annotations

import asyncio
import copy

import pytest
from tests.cluster.local import all_gone, family, server_of

from union import sandbox as sb


@pytest.mark.spec("K7", "I4")
async def test_contexts_keep_variables_in_a_session_of_a_run():
    async with await sb.session(name="notebook") as sbx:
        async with sbx.context() as ctx, sbx.context("bash") as shell:
            await ctx.run("x = 41")
            result = await ctx.run("print(x + 1); display({'a': 1}); x")
            assert (result.stdout, result.text) == ("42\n", "41")
            assert result.results[0].json == {"a": 1}
            failed = await ctx.run("y = 1\n1 / 0")
            assert (failed.error.name, failed.error.frames[0].line) == ("ZeroDivisionError", 2)
            ended = await ctx.run("while True: pass", timeout_s=0.2)
            assert (ended.ended, ended.state) == ("timeout", "kept")
            assert await ctx.get("x") == 41
            await shell.run("cd /tmp")
            assert (await shell.run("pwd")).stdout == "/tmp\n"
            await ctx.restart()
            assert (await ctx.run("'x' in globals()")).text == "False"
        pids = family(server_of(sbx))
    assert all_gone(pids)


@pytest.mark.spec("K7", "I5")
async def test_closing_a_reference_ends_only_its_own_contexts():
    async with await sb.session() as sbx:
        other = copy.copy(sbx)
        mine = await sbx.context().open()
        theirs = await other.context().open()
        await mine.run("x = 1")
        cell = asyncio.create_task(theirs.run("while True: pass"))
        while not theirs.busy:
            await asyncio.sleep(0)
        await other.close()
        assert (await cell).ended in {"closed", "interrupt"}
        assert not theirs.alive
        assert (await mine.run("x")).text == "1"

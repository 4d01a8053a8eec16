"""Contexts: interrupts, time limits and ends, and what of the variables they leave."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests.conftest import CONTEXT_WAYS, session_of

from union import sandbox as sb


@pytest.mark.spec("K3")
async def test_leaving_a_stream_early_interrupts_the_cell(ctx):
    async with contextlib.aclosing(ctx.stream("x = 5\nprint(1)\nwhile True: pass")) as stream:
        async for _ in stream:
            break
    assert (await ctx.run("x", timeout_s=20)).text == "5"


@pytest.mark.spec("K3")
async def test_a_slow_reader_pauses_the_cell(ctx):
    code = "import sys\nfor i in range(4096): sys.stdout.write('x' * 4096)\n"
    seen = 0
    async for event in ctx.stream(code, max_output_bytes=100):
        if isinstance(event, sb.CellOutput):
            seen += len(event.data)
            await asyncio.sleep(0)
        else:
            assert len(event.stdout) == 100
            assert event.truncated == ("stdout",)
    assert seen == 16 * 1024 * 1024


INTERRUPTED = {
    "busy loop": "while True: pass",
    "sleep": "import time; time.sleep(60)",
    "child": "import subprocess; subprocess.run(['sleep', '60'])",
    "await": "import asyncio; await asyncio.sleep(60)",
    "socket": "import socket; a, b = socket.socketpair(); a.recv(1)",
    "thread join": "import threading; e = threading.Event(); e.wait()",
}


@pytest.mark.spec("K3")
@pytest.mark.parametrize("what", INTERRUPTED)
async def test_a_timeout_ends_the_cell_and_keeps_the_variables(ctx, what):
    # The imports here, because C code of an import may answer an interrupt with an exception of its
    # own.
    await ctx.run("x = 1; import asyncio, socket, subprocess, threading, time")
    result = await ctx.run(INTERRUPTED[what], timeout_s=0.2)
    assert (result.ended, result.state) == ("timeout", "kept")
    assert result.error.name == "KeyboardInterrupt"
    assert (await ctx.run("x")).text == "1"
    assert ctx.generation == 0


SWALLOWED = """
import time

class Node:
    def __del__(self):
        if self.waits:
            print("go", flush=True)
            time.sleep(60)

node = Node()
node.waits = True
del node  # Python discards an exception of __del__
print("after")
while True:
    time.sleep(60)
"""


@pytest.mark.spec("K3")
async def test_an_interrupt_that_python_discards_is_repeated(ctx):
    await ctx.run("x = 1")
    stream = ctx.stream(SWALLOWED)
    assert (await anext(stream)).text == "go\n"
    ctx.interrupt()
    *texts, result = [event async for event in stream]
    assert [event.text for event in texts] in ([], ["after\n"])
    assert (result.ended, result.state, result.error.name) == (
        "interrupt",
        "kept",
        "KeyboardInterrupt",
    )
    for _ in range(20):  # neither signal ends a later cell
        assert (await ctx.run("x")).text == "1"


@pytest.mark.spec("K3")
async def test_interrupt_ends_the_cell_and_keeps_the_variables(ctx):
    await ctx.run("x = 1")
    stream = ctx.stream("print('go')\nwhile True: pass")
    assert (await anext(stream)).text == "go\n"
    ctx.interrupt()
    result = await anext(stream)
    assert (result.ended, result.state, result.error.name) == (
        "interrupt",
        "kept",
        "KeyboardInterrupt",
    )
    ctx.interrupt()  # no cell runs: nothing happens
    for _ in range(20):
        assert (await ctx.run("x")).text == "1"


@pytest.mark.spec("K3")
@pytest.mark.parametrize("what", ["sleep", "child", "socket"])
async def test_interrupt_ends_every_kind_of_wait(ctx, what):
    await ctx.run("x = 1")
    stream = ctx.stream(f"print('go')\n{INTERRUPTED[what]}")
    assert (await anext(stream)).text == "go\n"
    ctx.interrupt()
    *_, result = [event async for event in stream]
    assert (result.ended, result.state) == ("interrupt", "kept")
    assert result.error.name == "KeyboardInterrupt"
    assert (await ctx.run("x")).text == "1"


@pytest.mark.spec("K3")
async def test_a_late_interrupt_does_not_end_the_next_cell(ctx):
    for _ in range(20):
        task = asyncio.create_task(ctx.run("import time; time.sleep(0.002)"))
        await asyncio.sleep(0.002)
        ctx.interrupt()
        await task
        assert (await ctx.run("sum(range(1000))")).text == "499500"


@pytest.mark.spec("K3")
async def test_an_interrupt_before_the_cell_has_started_ends_it(ctx):
    await ctx.run("x = 1")
    for _ in range(20):
        task = asyncio.create_task(ctx.run("while True: pass"))
        while not ctx.busy:
            await asyncio.sleep(0)
        ctx.interrupt()
        result = await task
        assert (result.ended, result.state) == ("interrupt", "kept")
        assert (await ctx.run("x")).text == "1"


@pytest.mark.spec("K3")
async def test_a_restart_waits_for_nothing_and_queued_cells_follow_it(ctx):
    running = asyncio.create_task(ctx.run("x = 1\nwhile True: pass"))
    while not ctx.busy:
        await asyncio.sleep(0)
    queued = asyncio.create_task(ctx.run("'x' in globals()"))
    await asyncio.sleep(0)
    await ctx.restart()
    assert (await running).state == "lost"
    assert (await queued).text == "False"
    assert ctx.generation == 1


IGNORES = {
    "ignored": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    "C code": "import collections, itertools; collections.deque(itertools.count(), maxlen=0)",
}


@pytest.mark.spec("K3")
@pytest.mark.parametrize("what", IGNORES)
async def test_code_that_ignores_the_interrupt_is_killed_and_its_state_is_lost(jail, what):
    code = IGNORES[what]
    async with jail.context(interrupt_grace_s=0.2) as ctx:
        await ctx.run("x = 1")
        result = await ctx.run(code, timeout_s=0.1)
        assert (result.ended, result.state) == ("timeout", "lost")
        assert "did not end" in result.reason
        assert not ctx.alive
        with pytest.raises(sb.ContextLostError) as caught:
            await ctx.run("x")
        assert caught.value.code == "context-lost"
        await ctx.restart()
        assert (ctx.alive, ctx.generation) == (True, 1)
        assert (await ctx.run("'x' in globals()")).text == "False"


DEATHS = {
    "exit": ("import os; print('last words', flush=True); os._exit(3)", "code 3"),
    "crash": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    "closed": ("import os, time; os.closerange(3, 300); time.sleep(60)", "closed its connection"),
}


@pytest.mark.spec("K3")
@pytest.mark.parametrize("what", DEATHS)
async def test_the_end_of_the_interpreter_is_reported_with_its_reason(jail, what):
    code, reason = DEATHS[what]
    async with jail.context(restart="auto") as ctx:
        await ctx.run("x = 1")
        result = await ctx.run(code)
        assert (result.ended, result.state) == ("died", "lost")
        assert reason in result.reason
        if what == "exit":
            assert result.stdout == "last words\n"
        assert (await ctx.run("'x' in globals()")).text == "False"
        assert ctx.generation == 1


@pytest.mark.spec("K3")
@pytest.mark.parametrize("way", CONTEXT_WAYS)
async def test_reaching_the_memory_limit_is_reported(way):
    code = "x = bytearray(1 << 30)\nfor i in range(0, 1 << 30, 4096): x[i] = 1"
    async with (
        session_of(way, resources=sb.Resources(memory="256Mi")) as session,
        session.context() as ctx,
    ):
        result = await ctx.run(code)
        assert (result.ended, result.state) == ("oom", "lost")

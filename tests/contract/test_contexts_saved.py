"""save() and restore(): the whole interpreter, bounded, honest about what cannot be saved."""

from __future__ import annotations

import asyncio
import textwrap

import pytest

from union import sandbox as sb
from union.sandbox._contexts.specs import MAX_SNAPSHOTS


@pytest.mark.spec("K6")
async def test_a_saved_interpreter_is_restored_any_number_of_times(ctx):
    await ctx.run("import os, math\nx = [1]\ndef f(): return len(x)\nos.mkdir('d'); os.chdir('d')")
    one = await ctx.save()
    await ctx.run("x.append(2); y = 1; os.chdir('/tmp')")
    two = await ctx.save()
    await ctx.run("x = None; del math")
    for _ in range(3):
        await ctx.restore(one)
        found = await ctx.run("x.append(9); f(), 'y' in globals(), os.path.basename(os.getcwd())")
        assert found.text == "(2, False, 'd')"
        assert (await ctx.run("math.floor(1.5)")).text == "1"
    await ctx.restore(two)
    assert (await ctx.run("x, y, os.getcwd()")).text == "([1, 2], 1, '/tmp')"
    assert ctx.generation == 0
    assert ctx.alive
    assert one.generation == 0


@pytest.mark.spec("K6")
async def test_a_restored_interpreter_is_like_any_other(ctx):
    await ctx.run("x = 1")
    saved = await ctx.save()
    await ctx.restore(saved)
    result = await ctx.run("print('out'); display(2); 1 / 0")
    assert (result.stdout, result.error.name) == ("out\n", "ZeroDivisionError")
    assert [shown.text for shown in result.results] == ["2"]
    for code in ("while True: pass", "import time; time.sleep(60)"):
        result = await ctx.run(code, timeout_s=0.2)
        assert (result.ended, result.state) == ("timeout", "kept")
    assert (await ctx.run("import asyncio; await asyncio.sleep(0, x)")).text == "1"
    assert (await ctx.run("import subprocess; subprocess.run(['echo', 'c'])")).stdout == "c\n"
    await ctx.restore(saved)
    assert await ctx.get("x") == 1
    result = await ctx.run("import os; os._exit(7)")
    assert (result.ended, result.state) == ("died", "lost")
    assert "code 7" in result.reason, "the first process follows the restored interpreter"


@pytest.mark.spec("K6")
async def test_an_interrupt_does_not_end_snapshots(ctx):
    await ctx.run("x = 1")
    saved = await ctx.save()
    result = await ctx.run("x = 2\nwhile True: pass", timeout_s=0.2)
    assert result.state == "kept"
    await ctx.restore(saved)
    assert (await ctx.run("x")).text == "1"


CANNOT = {
    "thread": (
        "import threading; l = threading.Lock(); l.acquire()\n"  # noqa: ISC004
        "threading.Thread(target=l.acquire, name='mine', daemon=True).start()",
        "threads: mine",
    ),
    "raw thread": (
        "import _thread; l = _thread.allocate_lock(); l.acquire(); "  # noqa: ISC004
        "_thread.start_new_thread(l.acquire, ())",
        "threads: unnamed",
    ),
    "socket": ("import socket; s = socket.socket()", "sockets: descriptor "),
    "pipe": ("import os; p = os.pipe()", "pipes: descriptor "),
    "child": ("import subprocess; p = subprocess.Popen(['sleep', '60'])", "child processes: sleep"),
    "task": (
        "import asyncio; t = asyncio.create_task(asyncio.sleep(60), name='mine')\n"  # noqa: ISC004
        "await asyncio.sleep(0)",
        "asyncio tasks: mine",
    ),
    "module": (
        "import sys, types; sys.modules['grpc'] = types.ModuleType('grpc')",
        "modules with threads of their own: grpc",
    ),
}


@pytest.mark.spec("K6")
async def test_what_cannot_be_saved_is_named(jail):
    async def check(what: str) -> None:
        code, named = CANNOT[what]
        async with jail.context() as ctx:
            await ctx.run("x = 1")
            assert (await ctx.run(code)).ok
            with pytest.raises(sb.SandboxCellError) as caught:
                await ctx.save()
            assert caught.value.result.error.name == "NotSavableError"
            assert named in caught.value.result.error.value
            assert (await ctx.run("x")).text == "1", "the interpreter continues"

    for what in CANNOT:
        await check(what)


@pytest.mark.spec("K6")
async def test_frames_of_pandas_are_saved_beside_threads_of_its_libraries(ctx):
    """Libraries for linear algebra have threads; a signal to any of them would end the process."""
    pytest.importorskip("pandas", reason="pandas is not installed: make setup")
    await ctx.run("import os; os.environ['OPENBLAS_NUM_THREADS'] = '4'")
    code = "import numpy, pandas; df = pandas.DataFrame({'a': [1, 2]}); m = numpy.ones((300, 300))"
    assert (await ctx.run(code + "; (m @ m).sum(); len(os.listdir('/proc/self/task'))")).ok
    saved = await ctx.save()
    await ctx.run("df['a'] = 0")
    await ctx.restore(saved)
    assert (await ctx.run("int(df['a'].sum()), float((m @ m)[0, 0])")).text == "(3, 300.0)"


@pytest.mark.spec("K6")
async def test_a_finished_loop_and_open_files_can_be_saved(ctx):
    await ctx.run("import asyncio; await asyncio.sleep(0)\nf = open('log', 'w'); f.write('a')")
    saved = await ctx.save()
    await ctx.restore(saved)
    assert (await ctx.run("f.write('b'); f.close(); open('log').read()")).text == "'ab'"
    assert (await ctx.run("await asyncio.sleep(0, 5)")).text == "5"


@pytest.mark.spec("K6")
async def test_snapshots_are_bounded_and_can_be_discarded(ctx):
    saved = [await ctx.save() for _ in range(MAX_SNAPSHOTS)]
    with pytest.raises(sb.SandboxCellError, match="LimitError"):
        await ctx.save()
    await ctx.discard(saved[0])
    with pytest.raises(sb.SandboxCellError, match="no snapshot"):
        await ctx.restore(saved[0])
    with pytest.raises(sb.SandboxCellError, match="no snapshot"):
        await ctx.discard(saved[0])
    await ctx.restore(await ctx.save())
    assert (await ctx.run("1")).ok


@pytest.mark.spec("K6")
async def test_a_snapshot_ends_with_its_interpreter(ctx):
    saved = await ctx.save()
    await ctx.restart()
    with pytest.raises(sb.ContextLostError):
        await ctx.restore(saved)
    with pytest.raises(sb.SandboxUsageError):
        await ctx.restore("no snapshot")
    assert (await ctx.run("1")).ok


async def test_other_languages_refuse_to_be_saved(jail):
    async with jail.context("bash") as shell:
        with pytest.raises(sb.SandboxUsageError) as caught:
            await shell.save()
        assert caught.value.code == "context-unsupported"


async def test_a_killed_snapshot_is_reported_and_the_interpreter_continues(ctx):
    await ctx.run("x = 1")
    saved = await ctx.save()
    await ctx.run(
        textwrap.dedent("""
            import os, signal
            for entry in os.listdir('/proc'):
                if entry.isdecimal() and int(entry) not in (1, os.getpid()):
                    os.kill(int(entry), signal.SIGKILL)
            """)
    )
    with pytest.raises(sb.SandboxCellError, match="has ended"):
        await ctx.restore(saved)
    assert (await ctx.run("x")).text == "1"


FORGE = """
import gc, json, os, struct, sys
driver = sys.modules['_union_sandbox_driver']
me = next(o for o in gc.get_objects() if isinstance(o, driver.Driver))
"""


@pytest.mark.spec("K6")
async def test_forged_messages_about_snapshots_have_no_effect_on_others(ctx, jail):
    """A cell that is not restored cannot make the host follow another process."""
    await ctx.run(FORGE)
    result = await ctx.run("me.send({'t': 'restored', 'n': me.number, 'pid': 2})\n'own'")
    assert result.text == "'own'"
    for head in ("{'t': 'restored', 'n': 1, 'pid': 1}", "{'t': 'restored', 'n': 1, 'pid': 2**40}"):
        async with jail.context() as other:
            await other.run(FORGE)
            result = await other.run(f"me.send({head})\nimport time; time.sleep(60)")
            assert (result.ended, result.state) == ("died", "lost")
            assert "malformed message" in result.reason


async def test_a_forged_restore_harms_its_own_context_alone(jail):
    """The host follows the process that the forger names, and kills the context when it fails."""
    async with jail.context() as ctx, jail.context() as other:
        await ctx.run(FORGE + "x = 1")
        saved = await ctx.save()
        await ctx.run(
            "def restore(_driver, _operation, _head):\n"
            "    me.send({'t': 'restored', 'n': me.number, 'pid': 99999})\n"
            "    os._exit(3)\n"
            "me.snapshots['perform'] = restore"
        )
        with pytest.raises(sb.SandboxCellError) as caught:
            await asyncio.wait_for(ctx.restore(saved), 60)
        assert caught.value.result.state == "lost"
        assert not ctx.alive
        assert (await other.run("1 + 1")).text == "2"

"""Contexts: variables persist, cells report output, results, errors and ends as data."""

from __future__ import annotations

import asyncio
import json
import textwrap

import pytest
from tests.conftest import CONTEXT_WAYS, ISOLATED, session_of

from union import sandbox as sb


@pytest.mark.spec("K1")
async def test_variables_imports_functions_and_directory_persist(ctx):
    await ctx.run("import os, math\nx = 41\ndef f(n): return n + 1\nos.mkdir('d'); os.chdir('d')")
    await ctx.run("os.environ['COLOUR'] = 'blue'")
    result = await ctx.run("print(f(x), math.pi > 3, os.path.basename(os.getcwd()))")
    assert result.stdout == "42 True d\n"
    assert (await ctx.run("os.environ['COLOUR']")).text == "'blue'"
    assert result.ok
    assert (result.number, result.state, result.ended, result.error) == (3, "kept", "", None)


@pytest.mark.spec("K1")
async def test_the_last_expression_is_the_result_as_text_and_json(ctx):
    result = await ctx.run("x = [1, 'two']\nx")
    assert result.text == "[1, 'two']"
    assert result.result.json == [1, "two"]
    assert (await ctx.run("x;")).results == ()
    assert (await ctx.run("None")).results == ()
    assert (await ctx.run("_")).text == "[1, 'two']"
    assert (await ctx.run("")).ok


@pytest.mark.spec("K1")
async def test_display_and_representation_methods_give_mime_bundles(ctx):
    result = await ctx.run("""
        class Rich:
            def _repr_html_(self): return '<b>x</b>'
            def _repr_png_(self): return b'\\x89PNG data'
            def _repr_json_(self): return {'a': 1}
            def _repr_latex_(self): raise RuntimeError('no')
        class Bundle:
            def _repr_mimebundle_(self, include=None, exclude=None):
                return {'application/x-own': 'text', 'text/plain': 'own'}
        class Broken:
            def __repr__(self): raise ValueError('no')
        display(Rich(), Bundle())
        Broken()
        """)
    rich, bundle, broken = result.results
    assert (rich.kind, bundle.kind, broken.kind) == ("display", "display", "result")
    assert (rich.html, rich.png, rich.json) == ("<b>x</b>", b"\x89PNG data", {"a": 1})
    assert bundle.data["application/x-own"] == "text"
    assert bundle.text == "own"
    assert broken.text == "<Broken: repr() raised ValueError>"


@pytest.mark.spec("K1")
async def test_a_pandas_frame_is_html_and_a_figure_is_png(ctx):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: make setup")
    pytest.importorskip("pandas", reason="pandas is not installed: make setup")
    result = await ctx.run("import pandas as pd\npd.DataFrame({'n': [1, 2]})", timeout_s=60)
    assert "<table" in result.result.html, result
    assert "n" in result.text
    result = await ctx.run(
        "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3]); plt.show()\nplt.plot([3, 1])",
        timeout_s=60,
    )
    pictures = [shown.png for shown in result.results if shown.png]
    assert len(pictures) == 2, result.error
    assert all(picture.startswith(b"\x89PNG\r\n") for picture in pictures)


@pytest.mark.spec("K1")
async def test_an_exception_is_data_with_its_line_numbers(ctx):
    await ctx.run("def f(x):\n    y = 1\n    return y / x\n")
    result = await ctx.run("a = 1\n\nf(0)")
    assert not result.ok
    assert (result.error.name, result.error.value) == ("ZeroDivisionError", "division by zero")
    places = [(frame.file, frame.line, frame.function) for frame in result.error.frames]
    assert places == [("<cell 2>", 3, "<module>"), ("<cell 1>", 3, "f")]
    assert result.error.frames[1].text == "return y / x"
    assert "_union_sandbox" not in result.error.traceback
    assert 'File "<cell 1>", line 3, in f' in result.error.traceback
    assert (result.state, result.ended) == ("kept", "")


@pytest.mark.spec("K1")
@pytest.mark.parametrize(
    "code, name, line",
    [
        ("x = 1\nif:", "SyntaxError", 2),
        ("import sys\nsys.exit(3)", "SystemExit", 2),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", 1),
        ("input()", "EOFError", 1),
        ("def f(): f()\nf()", "RecursionError", 1),
        ("class E(Exception):\n  def __str__(self): raise OSError\nraise E", "E", 3),
        ("await nothing", "NameError", 1),
        ("import asyncio\nasync def f():\n  raise KeyError(1)\nawait f()", "KeyError", 4),
    ],
)
async def test_every_kind_of_exception_is_data(ctx, code, name, line):
    result = await ctx.run(code)
    assert result.error.name == name
    assert result.error.frames[0].line == line
    assert (await ctx.run("1 + 1")).text == "2"


async def test_ipython_syntax_is_explained(ctx):
    result = await ctx.run("!pip install x")
    assert result.error.name == "SyntaxError"
    assert "IPython" in result.error.traceback


@pytest.mark.spec("K1")
async def test_top_level_await_and_tasks_that_continue_between_cells(ctx):
    await ctx.run("""
        import asyncio
        seen = []
        async def tick():
            while True:
                seen.append(1)
                await asyncio.sleep(0.001)
        task = asyncio.create_task(tick())
        await asyncio.sleep(0.01)
        """)
    first = int((await ctx.run("len(seen)")).text)
    while int((await ctx.run("len(seen)")).text) == first:
        await asyncio.sleep(0.01)
    assert (await ctx.run("async def f(): return 7\nawait f()")).text == "7"
    assert (await ctx.run("asyncio.run(f())")).text == "7"


@pytest.mark.spec("K1")
async def test_output_of_children_and_c_code_is_in_order(ctx):
    result = await ctx.run("""
        import os, subprocess, sys
        print('one')
        subprocess.run(['echo', 'two'])
        os.write(1, b'three\\n')
        print('four', end='')
        print('error', file=sys.stderr)
        """)
    assert result.stdout == "one\ntwo\nthree\nfour"
    assert result.stderr == "error\n"


@pytest.mark.spec("K1")
async def test_env_of_a_cell_lasts_for_the_cell(ctx):
    await ctx.run("import os; os.environ['KEPT'] = 'before'")
    result = await ctx.run("os.environ['KEPT'], os.environ['NEW']", env={"KEPT": "c", "NEW": "n"})
    assert result.text == "('c', 'n')"
    assert (await ctx.run("os.environ['KEPT'], 'NEW' in os.environ")).text == "('before', False)"


@pytest.mark.spec("K1")
async def test_stream_yields_output_and_displays_as_they_come(ctx):
    stream = ctx.stream("print('a'); display(1); print('b'); 2")
    *shown, result = [event async for event in stream]
    assert isinstance(result, sb.CellResult)
    assert result.stdout == "a\nb\n"
    output = b"".join(event.data for event in shown if isinstance(event, sb.CellOutput))
    assert output == b"a\nb\n"
    assert [event.text for event in shown if isinstance(event, sb.MimeBundle)] == ["1", "2"]
    assert [bundle.text for bundle in result.results] == ["1", "2"]


@pytest.mark.spec("K1")
async def test_stream_delivers_before_the_cell_ends(ctx, jail):
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    stream = ctx.stream(f"print('first', flush=True)\n{wait}", timeout_s=60)
    assert (await anext(stream)).text == "first\n"
    assert ctx.busy
    await jail.put_bytes("go", b"")
    result = await anext(stream)
    assert isinstance(result, sb.CellResult)
    assert result.ok


@pytest.mark.spec("K3")
async def test_set_and_get_exchange_json_values(ctx):
    value = {"a": [1, 2.5, None, "é\U0001f600"], "b": {"c": True}}
    await ctx.set(x=value, y="text")
    assert (await ctx.run("x['b']['c'], y")).text == "(True, 'text')"
    assert await ctx.get("x") == value
    big = "z" * 3_000_000
    await ctx.set(big=big)
    assert await ctx.get("big") == big
    with pytest.raises(sb.SandboxCellError, match="NameError"):
        await ctx.get("missing")
    await ctx.run("s = {1}")
    with pytest.raises(sb.SandboxCellError, match="TypeError"):
        await ctx.get("s")
    with pytest.raises(sb.SandboxUsageError):
        await ctx.set(s={1})
    with pytest.raises(sb.SandboxUsageError):
        await ctx.get("a.b")


@pytest.mark.spec("K1")
async def test_check_raises_and_keeps_the_result(ctx):
    with pytest.raises(sb.SandboxCellError) as caught:
        await ctx.run("print('out')\n1 / 0", check=True)
    assert caught.value.result.stdout == "out\n"
    assert caught.value.code == "cell"
    assert "ZeroDivisionError: division by zero" in str(caught.value)


@pytest.mark.spec("K1")
async def test_output_between_cells_belongs_to_no_cell(ctx, jail):
    await ctx.run("""
        import os, threading, time
        def later():
            while not os.path.exists('go'): time.sleep(0.001)
            print('between', flush=True)
        threading.Thread(target=later).start()
        """)
    await jail.put_bytes("go", b"")
    while not ctx.between[0]:
        await asyncio.sleep(0.005)
    assert ctx.between[0] == "between\n"
    assert (await ctx.run("print('mine')")).stdout == "mine\n"


async def test_a_thread_that_writes_all_the_time_is_bounded_between_cells(ctx):
    await ctx.run("""
        import os, threading
        def flood():
            while True: os.write(2, b'x' * 4096)
        threading.Thread(target=flood, daemon=True).start()
        """)
    while len(ctx.between[1]) < 65536:
        await asyncio.sleep(0.005)
    result = await ctx.run("print('mine')", max_output_bytes=1000)
    assert result.stdout == "mine\n"
    assert len(result.stderr) <= 1000
    assert len(ctx.between[1]) == 65536


@pytest.mark.spec("K8")
async def test_the_processes_of_a_context_are_listed(jail):
    async with jail.context() as ctx, jail.context("bash") as other:
        await other.run("sleep 1001 &")
        code = (
            "import os, subprocess; p = subprocess.Popen(['sleep', '1002']); [os.getpid(), p.pid]"
        )
        own, child = json.loads((await ctx.run(code)).text)
        listed = {process.pid: process for process in await ctx.processes()}
        assert set(listed) == {own, child}, "neither those of others, nor the product's own"
        assert listed[child].command == ("sleep", "1002")
        assert (listed[child].parent, listed[child].left_behind) == (own, False)
        assert listed[own].memory_bytes > 2**20
        # Between its fork and its exec, it is a bash.
        while "sleep" not in {process.name for process in await other.processes()}:
            await asyncio.sleep(0.01)
        await ctx.run("p.kill(); p.wait()")
        assert [process.pid for process in await ctx.processes()] == [own]
        code = "import time; open('begun', 'w').close(); time.sleep(600)"
        running = asyncio.create_task(ctx.run(code, timeout_s=60))
        while "begun" not in {info.path for info in await jail.list_dir(".")}:
            await asyncio.sleep(0.01)
        assert len(await ctx.processes()) == 1, "a running cell does not hold the list up"
        ctx.interrupt()
        await running


@pytest.mark.spec("K8")
async def test_a_context_that_has_ended_has_no_processes(jail):
    async with jail.context() as ctx:
        assert (await ctx.run("import os; os._exit(3)")).state == "lost"
        assert await ctx.processes() == ()
        await ctx.restart()
        assert len(await ctx.processes()) == 1
    assert await ctx.processes() == ()


@pytest.mark.spec("K4")
async def test_several_contexts_of_a_session_are_separate_interpreters(jail):
    async with jail.context() as one, jail.context() as two:
        await asyncio.gather(one.run("x = 1"), two.run("x = 2"))
        results = await asyncio.gather(one.run("x"), two.run("x"))
        assert [result.text for result in results] == ["1", "2"]
        await one.run("open('shared', 'w').write('file')")
        assert (await two.run("open('shared').read()")).text == "'file'"
        assert await jail.run_code("print(open('shared').read())") == "file\n"


@pytest.mark.spec("K1")
async def test_cells_run_one_after_another_in_order(ctx):
    await ctx.run("seen = []")
    cells = [ctx.run(f"seen.append({number})") for number in range(20)]
    results = await asyncio.gather(*cells)
    assert [result.number for result in results] == list(range(2, 22))
    assert (await ctx.run("seen == list(range(20))")).text == "True"


async def test_a_busy_context_can_refuse_to_wait_and_its_queue_is_bounded(ctx):
    stream = ctx.stream("print(1)\nwhile True: pass")
    await anext(stream)
    with pytest.raises(sb.SandboxUsageError) as caught:
        await ctx.run("1", wait=False)
    assert caught.value.code == "context-busy"
    waiting = [asyncio.create_task(ctx.run("1")) for _ in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(sb.SandboxUsageError, match="64 cells waiting"):
        await ctx.run("1")
    waiting[5].cancel()
    ctx.interrupt()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[5], asyncio.CancelledError)
    assert all(result.text == "1" for result in results[:5] + results[6:])
    await stream.aclose()


@pytest.mark.spec("K3")
async def test_cancelling_a_call_interrupts_its_cell(ctx):
    await ctx.run("x = 1")
    task = asyncio.create_task(ctx.run("x = 2\nwhile True: pass"))
    while not ctx.busy:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await ctx.run("x", timeout_s=20)).text in {"1", "2"}
    assert ctx.generation == 0


@pytest.mark.spec("K4")
async def test_closing_a_context_ends_its_cell_and_its_processes(jail):
    ctx = await jail.context().open()
    await ctx.run("import subprocess; p = subprocess.Popen(['sleep', '1000'])")
    stream = ctx.stream("print(1)\nwhile True: pass")
    await anext(stream)
    await ctx.close()
    result = await anext(stream)
    assert (result.ended, result.state) == ("closed", "lost")
    with pytest.raises(sb.SessionClosedError):
        await ctx.run("1")
    await ctx.close()


@pytest.mark.spec("K4")
@pytest.mark.parametrize("way", CONTEXT_WAYS)
async def test_closing_the_session_ends_its_contexts(way):
    async with session_of(way) as session:
        ctx = await session.context().open()
        task = asyncio.create_task(ctx.run("while True: pass"))
        while not ctx.busy:
            await asyncio.sleep(0)
    result = await task
    assert (result.ended, result.state) == ("closed", "lost")
    with pytest.raises(sb.ContextLostError):
        await ctx.run("1")


async def test_bad_arguments_are_refused(ctx, jail):
    for call in (
        lambda: ctx.run(5),
        lambda: ctx.run("a\0b"),
        lambda: ctx.run("1", timeout_s=-1),
        lambda: ctx.run("1", network_mode="maybe"),
    ):
        with pytest.raises(sb.SandboxUsageError):
            await call()
    for options in ({"language": "cobol"}, {"restart": "yes"}, {"interrupt_grace_s": -1}):
        with pytest.raises(sb.SandboxUsageError):
            jail.context(**options)
    with pytest.raises(sb.SessionClosedError):
        await jail.context().run("1")


async def test_a_backend_without_isolation_refuses_contexts():
    async with session_of("none") as session:
        with pytest.raises(sb.SandboxUsageError) as caught:
            await session.context().open()
        assert caught.value.code == "context-unsupported"


@pytest.mark.parametrize("way", ISOLATED)
async def test_a_spare_driver_serves_the_next_context(way):
    async with session_of(way) as session:
        async with session.context(env={"A": "1"}) as ctx:
            await ctx.run("x = 1")
        pool = session._transport.pool
        while not pool.drivers.has_any:
            await asyncio.sleep(0.01)
        async with session.context(env={"A": "2"}) as ctx:
            result = await ctx.run("import os; os.environ['A'], 'x' in globals(), os.getcwd()")
            assert result.text == str(("2", False, session.work_dir))


async def test_modules_of_the_work_dir_and_the_venv_are_importable(ctx, jail):
    await jail.put_bytes("local_module.py", b"value = 7\n")
    assert (await ctx.run("import local_module; local_module.value")).text == "7"
    code = textwrap.dedent("""
        import sys, json
        json.dumps([__name__, sys.argv, sys.prefix])
        """)
    found = json.loads((await ctx.run(code)).result.data["text/plain"][1:-1])
    assert found == ["__main__", [""], f"{jail.work_dir}/.sandbox-venv"]

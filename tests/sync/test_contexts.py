"""Contexts without await: the same cells, from plain code and from several threads."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from union.sandbox import sync

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def session() -> Iterator[sync.Session]:
    with sync.on_device.session(backend="userns") as found:
        yield found


@pytest.mark.spec("K1")
def test_cells_streams_and_variables(session: sync.Session):
    with session.context() as ctx:
        assert ctx.run("x = 20; print('out')").stdout == "out\n"
        ctx.set(y=[1, 2])
        assert ctx.get("y") == [1, 2]
        *shown, result = ctx.stream("print('a'); display(x); x + 2")
        assert isinstance(result, sync.CellResult)
        assert [each.text for each in shown if isinstance(each, sync.MimeBundle)] == ["20", "22"]
        with pytest.raises(sync.SandboxCellError, match="ZeroDivisionError"):
            ctx.run("1 / 0", check=True)
        assert (ctx.alive, ctx.busy, ctx.generation, ctx.language) == (True, False, 0, "python")
    assert not ctx.alive


@pytest.mark.spec("K3", "K6")
def test_interrupt_restart_save_and_restore(session: sync.Session):
    with session.context() as ctx:
        ctx.run("x = 1")
        saved = ctx.save()
        stream = ctx.stream("x = 2\nprint('go')\nwhile True: pass")
        assert next(stream).text == "go\n"
        ctx.interrupt()
        assert next(stream).ended == "interrupt"
        assert ctx.get("x") == 2
        ctx.restore(saved)
        assert ctx.get("x") == 1
        ctx.discard(saved)
        ctx.restart()
        assert ctx.run("'x' in globals()").text == "False"
        assert ctx.generation == 1


@pytest.mark.spec("K4")
def test_threads_share_a_context(session: sync.Session):
    with session.context() as ctx:
        ctx.run("seen = []")
        threads = [threading.Thread(target=ctx.run, args=(f"seen.append({n})",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ctx.get("seen")) == list(range(8))

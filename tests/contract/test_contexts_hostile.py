"""Code in a context attacks the host through its driver: messages, output, descriptors."""

from __future__ import annotations

import asyncio
import json
import os
import textwrap
from typing import TYPE_CHECKING

import pytest

from union.sandbox._contexts import frames

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb

FORGE = textwrap.dedent("""
    import gc, json, struct, sys
    driver = sys.modules['_union_sandbox_driver']
    me = next(o for o in gc.get_objects() if isinstance(o, driver.Driver))
    def packet(first, left, part):
        me.sock.send(struct.pack('=BI', first, left) + part)
    def message(head, raw=b''):
        text = head if isinstance(head, bytes) else json.dumps(head).encode()
        packet(1, 0, struct.pack('=I', len(text)) + text + raw)
    """)


@pytest.fixture
async def ctx(jail: sb.Session) -> AsyncIterator[sb.Context]:
    async with jail.context(restart="auto") as context:
        assert (await context.run(FORGE)).ok
        yield context


@pytest.mark.spec("K1")
async def test_a_forged_end_belongs_to_its_own_cell_alone(ctx):
    """Control: without the forgery the same cell reports its own result."""
    forged = "message({'t': 'done', 'n': me.number, 'error': None})"
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.001)\nprint('late')\n7"
    result = await ctx.run(f"{forged}\n{wait}")
    assert result.ok
    assert result.results == ()
    release = asyncio.create_task(ctx.run("print('mine')\n8"))
    await asyncio.sleep(0)
    await ctx._opener().__self__.put("go", b"", mode=0o644, overwrite=True)
    result = await release
    assert [shown.text for shown in result.results] == ["8"]
    assert (await ctx.run(wait)).text == "7"


async def test_messages_about_other_cells_have_no_effect(ctx):
    result = await ctx.run("""
        for n in (0, 1, 3, 99, 2**40):
            message({'t': 'done', 'n': n, 'error': None})
            message({'t': 'display', 'n': n, 'parts': []})
        message({'t': 'ready'})
        'own'
        """)
    assert [shown.text for shown in result.results] == ["'own'"]


GARBAGE = {
    "no packet": "me.sock.send(b'xx')",
    "flags": "packet(9, 0, b'')",
    "too large": "packet(1, 2**31, b'')",
    "no head": "packet(1, 0, b'')",
    "head beyond the body": "packet(1, 0, struct.pack('=I', 2**31))",
    "no JSON": "message(b'{')",
    "deep JSON": "message(b'[' * 60000)",
    "a list": "message(b'[]')",
    "unknown": "message({'t': 'other', 'n': 1})",
    "number": "message({'t': 'done', 'n': -1})",
    "huge number": "message(b'{\"t\":\"done\",\"n\":' + b'9' * 5000 + b'}')",
    "parts": "message({'t': 'display', 'n': me.number, 'parts': [{'mime': 'a', 'size': 9}]})",
    "error": "message({'t': 'done', 'n': me.number, 'error': 5})",
    "usage": "message({'t': 'done', 'n': me.number, 'user_s': float('nan')})",
    "a large packet": "me.sock.send(bytes(70000))",
}


@pytest.mark.spec("K3")
@pytest.mark.parametrize("what", GARBAGE)
async def test_garbage_ends_the_context_and_says_so(ctx, what):
    result = await ctx.run(f"{GARBAGE[what]}\nimport time; time.sleep(60)")
    assert (result.ended, result.state) == ("died", "lost")
    assert "malformed message" in result.reason
    assert (await ctx.run("1")).text == "1"


async def test_a_message_that_is_cut_short_is_dropped(ctx):
    result = await ctx.run("packet(1, 100, b'begin'); packet(0, 5, b'end'); packet(0, 0, b''); 1")
    assert [shown.text for shown in result.results] == ["1"]


@pytest.mark.spec("K1")
async def test_displays_are_bounded_in_number_and_size(ctx):
    result = await ctx.run("for i in range(10_000): display(i)\n'end'", timeout_s=60)
    assert len(result.results) == frames.MAX_DISPLAYS
    assert result.truncated == ("results",)
    result = await ctx.run("for i in range(40): display('x' * 1_000_000)", timeout_s=60)
    assert sum(len(shown.text) for shown in result.results) <= frames.MAX_RESULT_BYTES
    assert result.truncated == ("results",)
    assert (await ctx.run("'small'")).text == "'small'"


async def test_forged_displays_are_bounded_by_the_host(ctx):
    result = await ctx.run(
        "for i in range(3000): message({'t': 'display', 'n': me.number, 'parts': []})"
    )
    assert len(result.results) == frames.MAX_DISPLAYS
    assert result.truncated == ("results",)
    body = "struct.pack('=I', len(head)) + head + b'x' * size"
    result = await ctx.run(f"""
        size = 9_000_000
        for i in range(3):
            head = json.dumps({{'t': 'display', 'n': me.number,
                               'parts': [{{'mime': 'a/b', 'size': size}}]}}).encode()
            whole = {body}
            room = 60_000
            for start in range(0, len(whole), room):
                part = whole[start:start + room]
                packet(int(start == 0), len(whole) - start - len(part), part)
        """)
    assert sum(len(shown.data["a/b"]) for shown in result.results) <= frames.MAX_RESULT_BYTES
    assert result.results
    assert result.truncated == ("results",)


async def test_descriptors_in_a_message_do_not_reach_the_host(ctx):
    before = set(os.listdir("/proc/self/fd"))
    result = await ctx.run("""
        import socket
        for _ in range(20):
            socket.send_fds(me.sock, [struct.pack('=BI', 0, 0)], [0] * 8)
        'sent'
        """)
    assert result.text == "'sent'"
    assert len(set(os.listdir("/proc/self/fd")) - before) < 8


@pytest.mark.spec("K1")
async def test_much_output_is_cut_and_the_host_stays_small(ctx):
    code = "import os\nblock = b'x' * (1 << 20)\nfor i in range(1024): os.write(1, block)"
    result = await ctx.run(code, max_output_bytes=1000, timeout_s=100)
    assert result.ok
    assert len(result.stdout) == 1000
    assert result.truncated == ("stdout",)


async def test_a_forked_child_does_not_speak_for_its_parent(ctx):
    result = await ctx.run("""
        import os
        pid = os.fork()
        if pid == 0:
            display('child')
        else:
            os.waitpid(pid, 0)
        'both'
        """)
    assert [shown.text for shown in result.results] == ["'both'"]
    assert (await ctx.run("os.getpid() == me.pid")).text == "True"


async def test_descriptors_of_the_driver_are_not_inherited(ctx):
    code = "import subprocess; subprocess.run(['ls', '/proc/self/fd'], close_fds=False)"
    result = await ctx.run(code)
    assert set(result.stdout.split()) <= {"0", "1", "2", "3"}


async def test_replaced_streams_do_not_hide_the_end_of_a_cell(ctx):
    await ctx.run("import sys; sys.stdout = None; sys.stderr = 5")
    assert (await ctx.run("1 + 1")).text == "2"
    await ctx.run("sys.stdout = sys.__stdout__; import os; os.close(1)")
    assert (await ctx.run("2 + 2")).text == "4"


@pytest.mark.spec("K8")
async def test_a_process_cannot_forge_its_number(ctx):
    """The kernel escapes a newline in a name, and a command line is data."""
    result = await ctx.run("""
        import ctypes, os, subprocess
        libc = ctypes.CDLL(None)
        libc.prctl(15, b'a)\\nNSpid:\\t1', 0, 0, 0)
        p = subprocess.Popen(['sh', '-c', 'read x', 'y' * 100_000], stdin=subprocess.PIPE)
        [os.getpid(), p.pid]
        """)
    listed = {process.pid: process for process in await ctx.processes()}
    assert list(listed) == json.loads(result.text)
    own, child = listed.values()
    assert own.name.startswith("a)")
    assert sum(map(len, child.command)) <= 4096

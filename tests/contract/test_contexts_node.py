"""A Node context: declarations, top-level await, results and interrupts."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="apt-get install nodejs")


@pytest.fixture
async def node(jail: sb.Session) -> AsyncIterator[sb.Context]:
    async with jail.context("node") as context:
        yield context


@pytest.mark.spec("K1")
async def test_declarations_persist_and_can_be_repeated(node):
    assert (await node.run("const x = 41; let y = 1; function f(n) { return n + 1 }")).ok
    assert (await node.run("const x = 42; f(x) + y")).text == "44"
    result = await node.run("console.log('out'); console.error('err'); ({a: [1, 'two']})")
    assert (result.stdout, result.stderr) == ("out\n", "err\n")
    assert result.result.json == {"a": [1, "two"]}
    assert (await node.run("undefined")).results == ()
    assert (await node.run("'text'")).text == "'text'"
    assert (await node.run("10n ** 3n")).text == "1000n"


@pytest.mark.spec("K1")
async def test_await_require_and_display(node):
    result = await node.run("await new Promise(r => setTimeout(() => r(7), 10))")
    assert result.text == "7"
    assert (await node.run("require('node:os').EOL")).text == "'\\n'"
    result = await node.run("display(1, [2]); 3")
    assert [(shown.kind, shown.text) for shown in result.results] == [
        ("display", "1"),
        ("display", "[ 2 ]"),
        ("result", "3"),
    ]


@pytest.mark.spec("K1")
async def test_an_exception_is_data_with_its_line(node):
    result = await node.run("function g() {\n  throw new TypeError('no')\n}\n\ng()")
    assert (result.error.name, result.error.value) == ("TypeError", "no")
    places = [(frame.file, frame.line, frame.function) for frame in result.error.frames]
    assert places[-1] == ("<cell 1>", 2, "g")
    assert ("<cell 1>", 5, "<module>") in places
    assert (await node.run("let (")).error.name == "SyntaxError"
    assert (await node.run("1 + 1")).text == "2"


@pytest.mark.spec("K3")
@pytest.mark.parametrize(
    "code",
    [
        "while (true) {}",
        "await new Promise(r => setTimeout(r, 60000))",
        "require('node:child_process').execSync('sleep 60')",
    ],
)
async def test_a_timeout_keeps_the_variables(node, code):
    await node.run("const x = 5")
    result = await node.run(code, timeout_s=0.3)
    assert (result.ended, result.state) == ("timeout", "kept")
    assert result.error is not None
    assert (await node.run("x", timeout_s=20)).text == "5"


@pytest.mark.spec("K3")
async def test_set_get_env_and_exit(jail):
    async with jail.context("node", restart="auto") as node:
        await node.set(v={"a": [1, None]})
        assert (await node.run("v.a[0]")).text == "1"
        await node.run("const w = ['x']")
        assert await node.get("w") == ["x"]
        with pytest.raises(sb.SandboxCellError, match="ReferenceError"):
            await node.get("missing")
        assert (await node.run("process.env.E", env={"E": "1"})).text == "'1'"
        assert (await node.run("process.env.E")).results == ()
        result = await node.run("process.exit(3)")
        assert (result.ended, result.state) == ("died", "lost")
        assert "code 3" in result.reason
        assert (await node.run("typeof w")).text == "'undefined'"


async def test_displays_are_bounded_and_children_inherit_nothing(node):
    result = await node.run("for (let i = 0; i < 3000; i++) display(i)", timeout_s=60)
    assert len(result.results) == 1000
    assert result.truncated == ("results",)
    code = "require('node:child_process').execSync('ls /proc/self/fd').toString().split('\\n')"
    assert set((await node.run(code)).result.json) <= {"0", "1", "2", "3", ""}

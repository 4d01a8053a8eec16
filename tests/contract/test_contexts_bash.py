"""A bash context: a shell that keeps its state, cannot be wedged, and survives an interrupt."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from union import sandbox as sb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def shell(jail: sb.Session) -> AsyncIterator[sb.Context]:
    async with jail.context("bash") as context:
        yield context


@pytest.mark.spec("K1")
async def test_directory_variables_functions_and_exit_codes(shell):
    result = await shell.run("cd /usr; export X=1; f() { echo f $X; }; echo hi")
    assert (result.stdout, result.stderr, result.exit_code, result.ok) == ("hi\n", "", 0, True)
    result = await shell.run("pwd; f; false")
    assert (result.stdout, result.exit_code, result.ok) == ("/usr\nf 1\n", 1, False)
    assert (await shell.run("(exit 7)")).exit_code == 7
    with pytest.raises(sb.SandboxCellError, match="ended with 3"):
        await shell.run("(exit 3)", check=True)


@pytest.mark.spec("K1")
@pytest.mark.parametrize(
    "code",
    ["echo 'never closed", "cat <<EOF\nheredoc", "read a; echo got=$a", "cat", "if true; then"],
)
async def test_no_command_waits_for_the_next_one(shell, code):
    await shell.run(code, timeout_s=20)
    result = await shell.run("echo next", timeout_s=20)
    assert (result.stdout, result.exit_code) == ("next\n", 0)


@pytest.mark.spec("K3")
@pytest.mark.parametrize(
    "code",
    [
        "echo a; sleep 30; echo NO",
        "while :; do :; done; echo NO",
        "yes | cat > /dev/null; echo NO",
        "for i in 1 2 3; do sleep 10; done; echo NO",
        "python3 -c 'while True: pass'; echo NO",
    ],
)
async def test_a_timeout_ends_the_whole_command_and_keeps_the_shell(shell, code):
    await shell.run("x=kept")
    result = await shell.run(code, timeout_s=0.3)
    assert (result.ended, result.state, result.exit_code) == ("timeout", "kept", 130)
    assert "NO" not in result.stdout
    assert (await shell.run("echo $x")).stdout == "kept\n"


@pytest.mark.spec("K3")
async def test_exit_ends_the_shell_and_says_so(jail):
    async with jail.context("bash", restart="auto") as shell:
        result = await shell.run("x=1; exit 3")
        assert (result.ended, result.state) == ("died", "lost")
        assert "code 3" in result.reason
        assert (await shell.run("echo [$x]")).stdout == "[]\n"


async def test_background_jobs_hold_nothing_up_and_end_with_the_context(shell):
    result = await shell.run("sleep 1000 & echo started", timeout_s=20)
    assert result.stdout == "started\n"
    # The job is a bash until it has executed its program.
    listed = "until grep -l '^sleep' /proc/[0-9]*/comm; do :; done"
    assert (await shell.run(listed, timeout_s=60)).stdout.startswith("/proc/")


async def test_children_inherit_no_descriptor_of_the_shell(shell):
    result = await shell.run("ls /proc/self/fd")
    assert set(result.stdout.split()) <= {"0", "1", "2", "3"}


@pytest.mark.spec("K3")
async def test_set_and_get(shell):
    await shell.set(A='it\'s "$x" `y`\n2', B="")
    assert (await shell.run('printf %s "$A"')).stdout == 'it\'s "$x" `y`\n2'
    assert await shell.get("A") == 'it\'s "$x" `y`\n2'
    assert await shell.get("B") == ""
    assert (await shell.run("env | grep -c ^B=")).stdout == "1\n"
    with pytest.raises(sb.SandboxCellError, match="missing is not set"):
        await shell.get("missing")
    with pytest.raises(sb.SandboxUsageError):
        await shell.set(A=5)


async def test_env_of_a_command_lasts_for_the_command(shell):
    await shell.run("export KEPT=before")
    result = await shell.run("echo $KEPT $NEW; (exit 4)", env={"KEPT": "c d", "NEW": "n"})
    assert (result.stdout, result.exit_code) == ("c d n\n", 4)
    assert (await shell.run('echo $KEPT "[${NEW-unset}]"')).stdout == "before [unset]\n"


async def test_streamed_output_and_long_commands(shell):
    events = [event async for event in shell.stream("echo one; echo two >&2")]
    assert events[-1].stdout == "one\n"
    assert events[-1].stderr == "two\n"
    text = "x" * 200_000
    assert (await shell.run(f": '{text}'; echo ${{#_}}", timeout_s=60)).ok


@pytest.mark.spec("K2")
async def test_each_command_has_its_own_network(shell):
    probe = "exec 9<>/dev/tcp/192.0.2.1/80; read -t 15 -u 9 x"
    result = await shell.run(f"({probe})", timeout_s=20)
    assert result.exit_code != 0
    assert [(d.host, d.allowed) for d in result.network] == [("192.0.2.1", False)]


async def test_a_forged_report_ends_the_shell(jail):
    async with jail.context("bash", restart="auto") as shell:
        result = await shell.run("__end() { printf 'garbage\\0' >&100; }", timeout_s=20)
        assert (result.ended, result.state) == ("died", "lost")
        assert "malformed" in result.reason
        assert (await shell.run("echo y", timeout_s=20)).stdout == "y\n"


async def test_cells_of_several_shells_run_at_once(jail):
    async with jail.context("bash") as one, jail.context("bash") as two:
        results = await asyncio.gather(one.run("x=1; sleep 0.1"), two.run("x=2; sleep 0.1"))
        assert all(result.ok for result in results)
        assert (await two.run("echo $x")).stdout == "2\n"

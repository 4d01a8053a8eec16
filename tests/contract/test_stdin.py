"""Standard input: end of file by default, bytes, or a live pipe."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from tests.conftest import SOON_S

from union import sandbox as sb

MIB = 1024 * 1024


@pytest.mark.spec("C2")
@pytest.mark.parametrize("options", [{}, {"stdin": None}, {"stdin": sb.DEVNULL}, {"stdin": b""}])
async def test_stdin_is_at_its_end_unless_given(sbx: sb.Session, options: dict) -> None:
    result = await sbx.exec("cat; echo end", timeout_s=5, **options)
    assert (result.stdout, result.termination_reason) == ("end\n", "")


@pytest.mark.spec("C2")
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_bytes_are_what_the_command_reads(sbx: sb.Session, kind: type) -> None:
    data = b"a\0b\r\n\xff\xfe"
    proc = await sbx.run("cat", stdin=kind(data))
    assert await proc.communicate() == (data, b"")


@pytest.mark.spec("C2")
async def test_large_bytes(sbx: sb.Session) -> None:
    data = bytes(range(256)) * (40 * 1024)
    result = await sbx.exec("sha256sum", stdin=data)
    assert result.stdout.split()[0] == hashlib.sha256(data).hexdigest()
    untouched = await sbx.exec("true", stdin=data)
    assert untouched.ok


@pytest.mark.spec("C2")
async def test_given_bytes_cannot_be_changed_by_the_command(sbx: sb.Session) -> None:
    result = await sbx.exec("echo x 1>&0; cat", stdin=b"given")
    assert result.stdout == "given"


@pytest.mark.spec("C2", "D3")
@pytest.mark.parametrize("value", [sb.PIPE, True])
async def test_a_pipe_is_a_conversation(sbx: sb.Session, value: object) -> None:
    proc = await sbx.run("while read x; do echo got $x; done; echo bye", stdin=value, stdout=True)
    assert proc.stdin is not None
    lines = proc.iter_stdout_lines()
    for word in ("one", "two"):
        proc.stdin.write(f"{word}\n".encode())
        await proc.stdin.drain()
        assert await asyncio.wait_for(anext(lines), SOON_S) == f"got {word}"
    proc.stdin.close()
    assert [line async for line in lines] == ["bye"]
    assert await proc.wait() == 0


@pytest.mark.spec("D3")
async def test_bytes_written_before_close_arrive(sbx: sb.Session) -> None:
    proc = await sbx.run("sleep 0.2; sha256sum", stdin=sb.PIPE, stdout=True)
    data = bytes(range(256)) * (16 * 1024)
    assert proc.stdin is not None
    for at in range(0, len(data), MIB):
        proc.stdin.write(data[at : at + MIB])
    proc.stdin.close()
    out, _ = await proc.communicate_text()
    assert out.split()[0] == hashlib.sha256(data).hexdigest()


@pytest.mark.spec("D1", "D3")
async def test_communicate_sends_input(sbx: sb.Session) -> None:
    data = b"x" * (3 * MIB)
    proc = await sbx.run("cat; echo err >&2", stdin=sb.PIPE, stdout=True, stderr=True)
    assert await proc.communicate(data) == (data, b"err\n")


@pytest.mark.spec("D1")
async def test_communicate_without_input_ends_stdin(sbx: sb.Session) -> None:
    proc = await sbx.run("cat; echo end", stdin=sb.PIPE, stdout=True)
    assert await asyncio.wait_for(proc.communicate(), SOON_S) == (b"end\n", b"")


@pytest.mark.spec("C10")
async def test_input_without_a_pipe_is_an_error(sbx: sb.Session) -> None:
    proc = await sbx.run("true", stdout=True)
    with pytest.raises(sb.SandboxUsageError, match="PIPE") as caught:
        await proc.communicate(b"data")
    assert caught.value.argument == "input"
    assert await proc.wait() == 0
    assert proc.stdin is None


@pytest.mark.spec("D3")
async def test_drain_waits_for_a_slow_reader(sbx: sb.Session) -> None:
    proc = await sbx.run("until test -e go; do sleep 0.02; done; cat >/dev/null", stdin=sb.PIPE)
    assert proc.stdin is not None
    proc.stdin.write(bytes(MIB))
    drained = asyncio.ensure_future(proc.stdin.drain())
    await asyncio.sleep(0.3)
    assert not drained.done()
    await sbx.put_bytes("go", b"")
    await drained
    proc.stdin.close()
    assert await proc.wait() == 0


@pytest.mark.spec("D3")
async def test_a_command_that_does_not_read_breaks_the_pipe(sbx: sb.Session) -> None:
    proc = await sbx.run("exec <&-; echo closed; sleep 60", stdin=sb.PIPE, stdout=True)
    assert proc.stdin is not None
    assert await anext(proc.iter_stdout_lines()) == "closed"
    proc.stdin.write(bytes(MIB))
    with pytest.raises(BrokenPipeError):
        await proc.stdin.drain()
    proc.kill()
    assert await proc.wait() == 137


@pytest.mark.spec("D3")
async def test_drain_ends_when_the_command_does(sbx: sb.Session) -> None:
    proc = await sbx.run("sleep 0.2", stdin=sb.PIPE)
    assert proc.stdin is not None
    proc.stdin.write(bytes(MIB))
    with pytest.raises(BrokenPipeError):
        await asyncio.wait_for(proc.stdin.drain(), SOON_S)
    assert await proc.wait() == 0


@pytest.mark.spec("C10", "D3")
async def test_misuse_of_stdin(sbx: sb.Session) -> None:
    proc = await sbx.run("cat", stdin=sb.PIPE, stdout=True)
    assert proc.stdin is not None
    with pytest.raises(sb.SandboxUsageError, match="bytes, not str"):
        proc.stdin.write("text")  # type: ignore[arg-type]
    proc.stdin.write(b"")
    proc.stdin.close()
    proc.stdin.close()
    with pytest.raises(sb.SandboxUsageError, match="closed"):
        proc.stdin.write(b"late")
    assert await proc.communicate() == (b"", b"")

"""Output: live, complete, in order, bounded in memory, for every way to read it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import SOON_S, eventually, host_dir, sandbox_processes

from union import sandbox as sb
from union.sandbox import constants
from union.sandbox._wire.frames import WINDOW

if TYPE_CHECKING:
    from tests.conftest import OpenSession

MIB = 1024 * 1024
# Each line is printed only when the one before it has been seen.
TICKER = "for i in 1 2 3; do echo tick $i; until test -e seen-$i; do sleep 0.02; done; done"
BOTH = """
import os
for n in range({blocks}):
    os.write(1, bytes([n % 251]) * {size})
    os.write(2, bytes([n % 241]) * {size})
"""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def ahead(way: str) -> int:
    """Return the MiB beyond the full buffer that pipes and connections can hold."""
    return 2 + (WINDOW // MIB if way.startswith("remote") else 0)


async def written(progress: Path, least: int) -> int:
    """Wait until a command has written ``least`` blocks; return how many it has written."""
    async with asyncio.timeout(SOON_S):
        while True:
            # The file is empty for a moment while the command writes it anew.
            now = int(progress.read_text() or 0) if progress.exists() else 0
            if now >= least:
                return now
            await asyncio.sleep(0.02)


def pattern(blocks: int, size: int, modulus: int) -> bytes:
    return b"".join(bytes([n % modulus]) * size for n in range(blocks))


@pytest.mark.spec("D1")
async def test_lines_are_seen_as_they_are_printed(sbx: sb.Session) -> None:
    proc = await sbx.run(TICKER, stdout=True)
    lines = proc.iter_stdout_lines()
    for n in range(1, 4):
        assert await asyncio.wait_for(anext(lines), SOON_S) == f"tick {n}"
        await sbx.put_bytes(f"seen-{n}", b"")
    assert [line async for line in lines] == []


@pytest.mark.spec("D1")
async def test_lines_of_stderr_are_live_too(sbx: sb.Session) -> None:
    proc = await sbx.run("echo first >&2; sleep 60", stderr=True)
    assert await asyncio.wait_for(anext(proc.iter_stderr_lines()), SOON_S) == "first"
    proc.kill()
    await proc.wait()


@pytest.mark.spec("D1")
async def test_both_streams_may_be_consumed_at_once(sbx: sb.Session) -> None:
    proc = await sbx.run(
        "for i in 1 2 3; do echo o$i; echo e$i >&2; sleep 0.05; done", stdout=True, stderr=True
    )

    async def lines(source) -> list[str]:
        return [line async for line in source]

    found = await asyncio.gather(lines(proc.iter_stdout_lines()), lines(proc.iter_stderr_lines()))
    assert found == [["o1", "o2", "o3"], ["e1", "e2", "e3"]]


@pytest.mark.spec("D1")
@pytest.mark.parametrize(
    "text, lines",
    [
        (rb"a\nb\n", ["a", "b"]),
        (rb"a\nlast", ["a", "last"]),
        (rb"a\r\nb\r\n", ["a", "b"]),
        (rb"one\rtwo\n", ["one\rtwo"]),
        (rb"\n\n", ["", ""]),
        (rb"", []),
        (rb"a\000b\n", ["a\0b"]),
        (rb"bad \377\376 end\n", ["bad \ufffd\ufffd end"]),
        (rb"cut \303\nnext", ["cut \ufffd", "next"]),
        (rb"\342\202\254\n", ["€"]),
        (rb"u\302\205v\342\200\250w\f\n", ["u\x85v\u2028w\x0c"]),
    ],
)
async def test_lines(sbx: sb.Session, text: bytes, lines: list[str]) -> None:
    proc = await sbx.run(["printf", text.decode()], stdout=True)
    assert [line async for line in proc.iter_stdout_lines()] == lines
    assert await proc.wait() == 0


@pytest.mark.spec("D1")
async def test_a_character_or_line_end_cut_in_two_writes(sbx: sb.Session) -> None:
    parts = (r"a\342", r"\202", r"\254b\r", r"\nc")
    script = "; sleep 0.1; ".join(f"printf '{part}'" for part in parts)
    proc = await sbx.run(script, stdout=True)
    assert [line async for line in proc.iter_stdout_lines()] == ["a€b", "c"]


@pytest.mark.spec("D1")
async def test_a_line_of_10_mb_comes_in_bounded_pieces(sbx: sb.Session) -> None:
    code = "import sys; sys.stdout.write('é' * 5_000_000 + '\\nshort\\n')"
    proc = await sbx.run(code, script_type="python", stdout=True)
    pieces = [line async for line in proc.iter_stdout_lines()]
    assert pieces.pop() == "short"
    assert "".join(pieces) == "é" * 5_000_000
    assert max(len(piece.encode()) for piece in pieces) <= constants.MAX_LINE_BYTES + 4


@pytest.mark.spec("D1")
async def test_communicate_text_replaces_what_is_not_utf8(sbx: sb.Session) -> None:
    proc = await sbx.run(r"printf 'a\377\0b\r\n'; printf '\303' >&2", stdout=True, stderr=True)
    assert await proc.communicate_text() == ("a\ufffd\0b\r\n", "\ufffd")


@pytest.mark.spec("D1", "D6")
async def test_bytes_arrive_unchanged(sbx: sb.Session) -> None:
    await sbx.put_bytes("blob", bytes(range(256)) * 4096)
    proc = await sbx.run("cat blob", stdout=True)
    assert (await proc.communicate())[0] == bytes(range(256)) * 4096
    assert (await sbx.run("cat blob")).result().stdout.encode("utf-8").count(b"\0") == 4096


@pytest.mark.spec("D6")
@pytest.mark.parametrize("first", ["stdout", "stderr"])
async def test_one_stream_is_read_to_its_end_and_then_the_other(
    sbx: sb.Session, first: str
) -> None:
    code = BOTH.format(blocks=96, size=64 * 1024)
    proc = await sbx.run(code, script_type="python", stdout=True, stderr=True)
    order = [("stdout", proc.iter_stdout), ("stderr", proc.iter_stderr)]
    if first == "stderr":
        order.reverse()
    found = {}
    for name, chunks in order:
        found[name] = b"".join([chunk async for chunk in chunks()])
    assert found["stdout"] == pattern(96, 64 * 1024, 251)
    assert found["stderr"] == pattern(96, 64 * 1024, 241)
    assert await proc.wait() == 0


@pytest.mark.spec("D6")
async def test_lines_of_one_stream_and_then_the_other(sbx: sb.Session) -> None:
    count = "seq -f %0999.0f 2000"  # more than a pipe and the buffer hold
    proc = await sbx.run(f"{count}; {count} >&2; echo last", stdout=True, stderr=True)
    out = [line async for line in proc.iter_stdout_lines()]
    err = [line async for line in proc.iter_stderr_lines()]
    assert out == [*(f"{n:0999}" for n in range(1, 2001)), "last"]
    assert err == [*(f"{n:0999}" for n in range(1, 2001))]


@pytest.mark.spec("D6")
async def test_the_unread_stream_is_slowed_only_after_64_mib(way: str, sbx: sb.Session) -> None:
    code = """
        import os
        for n in range(80):
            os.write(2, bytes(1 << 20))
            open("progress", "w").write(str(n + 1))
        print("done")
    """
    proc = await sbx.run(code, script_type="python", stdout=True, stderr=True)
    out = asyncio.create_task(anext(proc.iter_stdout_lines()))
    progress = Path(host_dir(sbx), "progress")
    await written(progress, 64)
    await asyncio.sleep(0.4)  # a writer that is not slowed goes on
    assert 64 <= await written(progress, 64) <= 64 + ahead(way)
    assert not out.done()
    total = sum([len(chunk) async for chunk in proc.iter_stderr()])
    assert total == 80 * MIB
    assert await out == "done"
    assert await proc.wait() == 0


@pytest.mark.spec("D6")
async def test_wait_with_both_pipes_full_does_not_deadlock(sbx: sb.Session) -> None:
    code = BOTH.format(blocks=64, size=64 * 1024)
    proc = await sbx.run(code, script_type="python", stdout=True, stderr=True)
    assert await asyncio.wait_for(proc.wait(), 40) == 0
    out, err = await proc.communicate()
    assert out == pattern(64, 64 * 1024, 251)
    assert err == pattern(64, 64 * 1024, 241)


@pytest.mark.spec("D1", "D6")
async def test_communicate_reads_both_full_pipes(sbx: sb.Session) -> None:
    code = BOTH.format(blocks=200, size=64 * 1024)
    proc = await sbx.run(code, script_type="python", stdout=True, stderr=True)
    out, err = await proc.communicate()
    assert hashlib.sha256(out).digest() == hashlib.sha256(pattern(200, 65536, 251)).digest()
    assert hashlib.sha256(err).digest() == hashlib.sha256(pattern(200, 65536, 241)).digest()
    assert await proc.communicate() == (out, err)


@pytest.mark.spec("D6")
async def test_a_writer_without_a_reader_is_slowed(way: str, sbx: sb.Session) -> None:
    code = """
        import os
        for n in range(48):
            os.write(1, bytes([n]) * (1 << 20))
            open("progress", "w").write(str(n + 1))
    """
    proc = await sbx.run(code, script_type="python", stdout=True)
    progress = Path(host_dir(sbx), "progress")
    await written(progress, 1)
    await asyncio.sleep(0.4)  # a writer that is not slowed goes on
    assert 1 <= await written(progress, 1) <= 1 + ahead(way)
    assert proc.returncode is None
    out, _ = await proc.communicate()
    assert out == pattern(48, MIB, 251)


@pytest.mark.slow
@pytest.mark.spec("D6")
async def test_a_slow_reader_costs_no_memory(sbx: sb.Session) -> None:
    size = 256 * MIB
    proc = await sbx.run(f"head -c {size} /dev/zero", stdout=True)
    chunks = proc.iter_stdout()
    total = len(await anext(chunks))
    before = resident()
    most = seen = 0
    async for chunk in chunks:
        total += len(chunk)
        seen += 1
        if seen % 16 == 0:
            await asyncio.sleep(0.004)
            most = max(most, resident() - before)
    assert total == size
    assert most < 32 * MIB
    assert await proc.wait() == 0


@pytest.mark.spec("D6")
@pytest.mark.parametrize("streams", [{"stdout": True, "stderr": True}, {}])
async def test_output_beyond_the_limit_is_cut_and_reported(sbx: sb.Session, streams: dict) -> None:
    text = "head -c 3000000 /dev/zero; echo short >&2; exit 2"
    if streams:
        proc = await sbx.run(text, **streams)
        out, err = await proc.communicate(max_output_bytes=MIB)
    else:
        proc = await sbx.run(text, max_output_bytes=MIB)
        out, err = await proc.communicate()
    assert (len(out), err) == (MIB, b"short\n")
    assert proc.truncated == ("stdout",)
    assert proc.returncode == 2


@pytest.mark.spec("D5", "D6")
async def test_exec_says_when_output_was_cut(sbx: sb.Session) -> None:
    cut = await sbx.exec("printf 123456; printf abc >&2", max_output_bytes=5)
    assert (cut.stdout, cut.stderr, cut.truncated) == ("12345", "abc", True)
    whole = await sbx.exec("printf 12345", max_output_bytes=5)
    assert (whole.stdout, whole.truncated) == ("12345", False)
    none = await sbx.exec("printf 1", max_output_bytes=0)
    assert (none.stdout, none.truncated, none.ok) == ("", True, True)


@pytest.mark.spec("D6")
async def test_collected_output_is_capped_by_default(sbx: sb.Session) -> None:
    proc = await sbx.run(f"head -c {constants.MAX_OUTPUT_BYTES + 1} /dev/zero")
    out, _ = await proc.communicate()
    assert len(out) == constants.MAX_OUTPUT_BYTES
    assert proc.truncated == ("stdout",)


@pytest.mark.spec("D1", "D6")
async def test_a_reader_that_stops_early_loses_nothing(sbx: sb.Session) -> None:
    proc = await sbx.run("printf 'a\\nb\\nc\\n'; sleep 0.2; echo d", stdout=True)
    await asyncio.sleep(0.1)
    async for line in proc.iter_stdout_lines():
        assert line == "a"
        break
    assert [line async for line in proc.iter_stdout_lines()] == ["b", "c", "d"]


@pytest.mark.spec("D1", "D6")
async def test_a_reader_that_gives_up_inside_a_line_loses_nothing(sbx: sb.Session) -> None:
    proc = await sbx.run("printf par; read x; printf 'tial\\n'", stdin=sb.PIPE, stdout=True)
    assert proc.stdin is not None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(proc.iter_stdout_lines()), 0.3)
    proc.stdin.close()
    assert [line async for line in proc.iter_stdout_lines()] == ["partial"]


@pytest.mark.spec("D1", "D6")
async def test_lines_first_and_communicate_for_the_rest(sbx: sb.Session) -> None:
    proc = await sbx.run("printf 'ready\\nrest\\nlast'", stdout=True)
    await asyncio.sleep(0.1)
    assert await anext(proc.iter_stdout_lines()) == "ready"
    assert await proc.communicate() == (b"rest\nlast", b"")


@pytest.mark.spec("D1")
async def test_a_stream_read_before_is_empty_for_communicate(sbx: sb.Session) -> None:
    proc = await sbx.run("echo out; echo err >&2", stdout=True, stderr=True)
    assert [chunk async for chunk in proc.iter_stdout()] == [b"out\n"]
    assert await proc.communicate() == (b"", b"err\n")


@pytest.mark.spec("C2")
@pytest.mark.parametrize("value", [False, sb.DEVNULL])
async def test_discarded(sbx: sb.Session, value: object) -> None:
    proc = await sbx.run("head -c 5000000 /dev/zero; echo kept >&2", stdout=value, stderr=True)
    assert await proc.communicate() == (b"", b"kept\n")
    with pytest.raises(sb.SandboxUsageError, match="stdout was not captured") as caught:
        await anext(proc.iter_stdout())
    assert "stdout=True" in caught.value.hint


@pytest.mark.spec("C2", "D1")
async def test_collected_beside_a_pipe(sbx: sb.Session) -> None:
    proc = await sbx.run("echo out; head -c 3000000 /dev/zero >&2", stdout=sb.PIPE)
    assert [line async for line in proc.iter_stdout_lines()] == ["out"]
    out, err = await proc.communicate()
    assert (out, len(err)) == (b"", 3000000)


@pytest.mark.spec("C2")
async def test_inherited_streams_reach_the_callers_own(sbx: sb.Session, capfd) -> None:
    proc = await sbx.run("echo out; echo err >&2; exit 3", stdout=sb.INHERIT, stderr=sb.INHERIT)
    assert proc.returncode == 3
    assert capfd.readouterr() == ("out\n", "err\n")
    assert await proc.communicate() == (b"", b"")


@pytest.mark.spec("C2")
async def test_inherited_streams_are_live(sbx: sb.Session, capfd) -> None:
    proc = await sbx.run("echo now; sleep 60", stdout=sb.INHERIT, background=True)
    seen = ""
    for _ in range(100):
        await asyncio.sleep(0.02)
        seen += capfd.readouterr().out
        if seen:
            break
    assert seen == "now\n"
    assert proc.returncode is None
    proc.kill()
    await proc.wait()


@pytest.mark.spec("C2")
async def test_much_inherited_output_is_whole(sbx: sb.Session, capfd) -> None:
    await sbx.run("seq 1 200000", stdout=sb.INHERIT)
    assert capfd.readouterr().out == "".join(f"{n}\n" for n in range(1, 200001))


@pytest.mark.spec("C2")
@pytest.mark.parametrize("mode", [True, None])
async def test_the_usual_names_of_streams_can_be_opened(sbx: sb.Session, mode: object) -> None:
    proc = await sbx.run("echo a > /dev/stdout; echo b > /dev/stderr", stdout=mode, stderr=mode)
    assert await proc.communicate() == (b"a\n", b"b\n")


@pytest.mark.spec("C2", "G2")
async def test_no_stream_is_a_terminal(sbx: sb.Session) -> None:
    code = "import os; print([os.isatty(fd) for fd in (0, 1, 2)])"
    assert await sbx.run_code(code) == "[False, False, False]\n"


@pytest.mark.spec("D7")
@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.exec("setsid sleep 60 & sleep 60"),
        lambda s: s.exec("trap '' TERM INT; sleep 60; sleep 60"),
        lambda s: s.run_code("import time; time.sleep(60)"),
        lambda s: s.run("sleep 60"),
        lambda s: s.exec("yes"),
    ],
)
async def test_cancelling_a_one_shot_kills_it(sbx: sb.Session, call) -> None:
    task = asyncio.create_task(call(sbx))
    while not sandbox_processes():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.1)
    assert eventually(lambda: not sandbox_processes())
    assert (await sbx.exec("echo usable")).stdout == "usable\n"


@pytest.mark.spec("D7")
async def test_cancelling_communicate_kills(sbx: sb.Session) -> None:
    proc = await sbx.run("setsid sleep 60 & echo up; sleep 60", stdout=True, stderr=True)
    task = asyncio.create_task(proc.communicate())
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.wait_for(proc.wait(), SOON_S) == 137
    assert eventually(lambda: not sandbox_processes())


@pytest.mark.spec("D7")
async def test_cancelling_at_once_never_leaves_a_command(sbx: sb.Session) -> None:
    for delay in (0, 0, 0.0005, 0.001, 0.002, 0.004):
        task = asyncio.create_task(sbx.exec("sleep 60"))
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.sleep(0.1)
    assert eventually(lambda: not sandbox_processes())


@pytest.mark.spec("D7")
async def test_waiting_with_a_limit_does_not_kill(sbx: sb.Session) -> None:
    proc = await sbx.run("sleep 0.5; echo survived", stdout=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(proc.wait(), 0.1)
    assert await proc.communicate() == (b"survived\n", b"")


@pytest.mark.spec("D6")
async def test_unread_output_can_be_read_after_the_session_closed(
    open_session: OpenSession,
) -> None:
    size = 1_100_000  # more than is read ahead, by less than a pipe holds
    async with open_session() as sbx:
        proc = await sbx.run(f"head -c {size} /dev/zero", stdout=True)
        chunks = proc.iter_stdout()
        got = len(await anext(chunks))
        async with asyncio.timeout(40):
            while proc.returncode is None:
                await asyncio.sleep(0.01)
    async for chunk in chunks:
        got += len(chunk)
    assert got == size

"""The portable launcher: its decoders and its search for the processes of a run, against models."""

from __future__ import annotations

import ctypes
import random
import struct
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.portable.engine import FLAGS, ROOT, Engine, build_launcher, stand_in

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAX = 64


class Process(ctypes.Structure):
    """struct process of native/posix/posix.h."""

    _fields_ = (
        ("unique", ctypes.c_uint64),
        ("parent", ctypes.c_uint64),
        ("pid", ctypes.c_int),
        ("ppid", ctypes.c_int),
        ("sid", ctypes.c_int),
        ("label", ctypes.c_byte),
    )


class Tree(ctypes.Structure):
    """struct tree of native/posix/posix.h."""

    _fields_ = (
        ("first", ctypes.c_int),
        ("known", ctypes.c_void_p),
        ("nknown", ctypes.c_size_t),
        ("room", ctypes.c_size_t),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("native") / "pure.so"
    sources = [str(ROOT / "native/posix" / name) for name in ("tree.c", "begin.c")]
    subprocess.run(["cc", *FLAGS, "-shared", "-fPIC", *sources, "-o", str(out)], check=True)
    found = ctypes.CDLL(str(out))
    found.tree_members.restype = ctypes.c_size_t
    return found


def members(library: ctypes.CDLL, tree: Tree, table: list[Process]) -> set[int]:
    out = (ctypes.c_int * MAX)()
    rows = (Process * max(len(table), 1))(*table)
    n = library.tree_members(
        ctypes.byref(tree), rows, ctypes.c_size_t(len(table)), out, ctypes.c_size_t(MAX)
    )
    return set(out[:n])


def modelled(first: int, known: set[int], table: list[Process]) -> set[int]:
    """The same rules, written as a fixed point over sets."""
    found: set[int] = set()
    while True:
        more = {
            p.pid
            for p in table
            if p.label == 1
            or (
                p.label < 0
                and (first in (p.pid, p.sid) or p.ppid in found or (p.parent and p.parent in known))
            )
        }
        known |= {p.unique for p in table if p.pid in more and p.unique}
        if more == found:
            return found
        found = more


def test_members_of_a_run_agree_with_a_model(library: ctypes.CDLL) -> None:
    chance = random.Random(5)
    orphans = 0
    for _ in range(3000):
        first = chance.randrange(2, 12)
        tree, known = Tree(first=first), set[int]()
        for _ in range(3):  # what one look has learnt counts in the next
            pids = chance.sample(range(2, 30), chance.randrange(0, 14))
            labels = chance.choice([(-1,), (0, 1)])
            table = [
                Process(
                    chance.choice([0, pid + 1000]),
                    chance.choice([0, chance.randrange(1000, 1030)]),
                    pid,
                    chance.choice([1, *pids]),
                    chance.choice(pids),
                    chance.choice(labels),
                )
                for pid in pids
            ]
            # Labels are all or nothing, and then parents say nothing about children.
            expected = modelled(first, known, table)
            assert members(library, tree, table) == expected
            orphans += sum(p.ppid == 1 and p.pid in expected and p.sid != first for p in table)
    assert orphans > 100  # the model has really been tried on orphans


def test_a_label_decides_alone(library: ctypes.CDLL) -> None:
    table = [Process(0, 0, 5, 1, 5, 0), Process(0, 0, 6, 5, 5, 0), Process(0, 0, 7, 1, 9, 1)]
    assert members(library, Tree(first=5), table) == {7}


def decoded(library: ctypes.CDLL) -> Callable[[int, bytes], tuple[int, str, list[str]]]:
    def decode(count: int, body: bytes, zero: int = 0) -> tuple[int, str, list[str]]:
        head = struct.pack("=6IQ", 13, 1, 0, count, 0, zero, 0)
        text = ctypes.create_string_buffer(body, max(len(body), 1))
        label, args = ctypes.c_char_p(), (ctypes.c_char_p * 2048)()
        result = library.begin_decode(
            head,
            ctypes.c_size_t(len(head) + len(body)),
            text,
            ctypes.byref(label),
            args,
        )
        if result < 0:
            return result, "", []
        return result, (label.value or b"").decode(), [(a or b"").decode() for a in args[:count]]

    return decode


def test_a_request_is_split_into_label_and_arguments(library: ctypes.CDLL) -> None:
    decode = decoded(library)
    assert decode(0, b"\0") == (0, "", [])
    assert decode(2, b"label\0one\0two words\0") == (0, "label", ["one", "two words"])
    assert decode(1, b"label\0\0") == (0, "label", [""])


@pytest.mark.parametrize(
    "count, body",
    [
        (0, b""),
        (0, b"label"),
        (1, b"label\0"),
        (1, b"label\0one"),
        (1, b"label\0one\0two\0"),
        (0, b"label\0one\0"),
        (5000, b"label\0" * 5001),
        (0, b"x" * 64 + b"\0"),
    ],
)
def test_a_request_that_does_not_match_its_head_is_refused(
    library: ctypes.CDLL, count: int, body: bytes
) -> None:
    assert decoded(library)(count, body)[0] == -1


SESSION = """\
import asyncio
from union import sandbox as sb

async def main():
    limits = sb.Resources(memory="256Mi")
    async with sb.on_device.session(backend="none", resources=limits) as sbx:
        assert (await sbx.exec("echo fine; exit 3")).returncode == 3
        assert await sbx.run_code("print(6 * 7)") == "42\\n"
        assert (await sbx.exec("echo " + "x" * 300_000)).ok
        assert (await sbx.exec("sleep 9", timeout_s=0.2)).termination_reason == "timeout"
        proc = await sbx.run("stty size", pty=(5, 6))
        assert await proc.communicate() == (b"5 6\\r\\n", b"")
        result = await sbx.exec("x = b'x' * 600_000_000; print(len(x))", script_type="python")
        assert result.termination_reason == "oom", result
        try:
            await sbx.run(["/nothing/here"])
        except sb.SandboxExecutionError:
            pass
        for _ in range(4):
            await sbx.run("sleep 60", stdout=True)
    print("clean")

asyncio.run(main())
"""


def test_the_launcher_runs_clean_under_address_and_undefined_sanitizers(tmp_path: Path) -> None:
    engine = Engine(build_launcher(tmp_path, sanitize=True), stand_in(tmp_path))
    done = engine.python("-W", "ignore", "-c", SESSION, ASAN_OPTIONS="detect_leaks=0")
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr

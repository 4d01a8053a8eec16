"""Every block of the guide to remote sessions runs in order, with one server."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from tests.docs.blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

PAGE = ROOT / "docs" / "guides" / "remote.md"
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def matches(shown: str, printed: str) -> bool:
    """Return whether the output matches the page, where ``...`` matches anything."""
    return (
        re.fullmatch(".*".join(map(re.escape, shown.split("..."))), printed, re.DOTALL) is not None
    )


def test_dots_stand_for_anything_and_nothing_else_does():
    assert matches("a...c\n", "abbbc\n")
    assert not matches("a...c\n", "abbbd\n")
    assert not matches("abc\n", "abc\nd\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.spec("I1", "I2")
def test_every_block_does_what_the_page_says(tmp_path: Path):
    port = free_port()
    blocks = _FENCE.findall(PAGE.read_text(encoding="utf-8").replace("8080", str(port)))
    scripts = tmp_path / "bin"
    work = tmp_path / "work"
    scripts.mkdir()
    (scripts / "sandbox-server").write_text(
        f'#!/bin/sh\nexec {sys.executable} -m union.sandbox.server "$@" --work-dir {work}\n'
    )
    (scripts / "sandbox-server").chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{scripts}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
    }
    kind, first = blocks.pop(0)
    assert (kind, "sandbox-server" in first) == ("sh", True)
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(
            ["sh", "-ec", first.replace("\nsandbox-server", "\nexec sandbox-server")],
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert server.stdout is not None
        assert b"ready" in server.stdout.readline(), (tmp_path / "log").read_text()
        run = 0
        for at, (kind, text) in enumerate(blocks):
            if kind == "text":
                continue
            argv = [sys.executable, "-c", text] if kind == "python" else ["sh", "-ec", text]
            done = subprocess.run(
                argv,
                check=False,
                cwd=tmp_path,
                env=env,
                capture_output=True,
                text=True,
                timeout=110,
            )
            assert done.returncode == 0, f"{text}\n{done.stderr}"
            expected = blocks[at + 1] if at + 1 < len(blocks) else ("", "")
            if expected[0] == "text":
                shown = expected[1].replace("/tmp/sandbox-work", str(work))
                assert matches(shown, done.stdout), done.stdout
                run += 1
        assert run >= 4
    finally:
        server.terminate()
        assert server.wait(20) == 0
        server.stdout.close()


def test_the_wire_protocol_page_lists_every_frame_kind():
    from union.sandbox._wire.frames import PROTOCOL, Kind

    text = (ROOT / "docs" / "reference" / "wire.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) ([A-Z_]+) \|", text, re.MULTILINE)
    listed = {(int(number), name) for number, name in rows}
    assert listed == {(kind.value, kind.name) for kind in Kind}
    assert PROTOCOL in text

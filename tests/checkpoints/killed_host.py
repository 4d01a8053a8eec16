"""A program whose children are killed at each step of their checkpoints, for ``test_killed``.

For n = 1, 2, ... a child makes the calls of a scenario and kills itself right before its n-th step,
until a child has no such step. For each child, one line of JSON is printed.

Usage: python -m tests.checkpoints.killed_host SCENARIO BACKEND PLACE [DIRECTORY]

PLACE is where private work dirs are made: elsewhere, any other process would sweep what is left.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from tests.checkpoints.steps import Steps

from union import sandbox as sb
from union.sandbox._linux.launcher import Launcher
from union.sandbox.on_device import _layer_merging, _workdir

FILES = {"a": "1", "d/b": "2"}
MAX_CHILDREN = 400


def start_of(pid: int) -> int | None:
    """Return when a process started, which tells it from a later one with the same id.

    None if it has ended, also if its parent has not waited for it: some places have no init.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])


class Child:
    """One child: what it reports goes through a pipe, as it may end at any moment."""

    def __init__(self, at: int, pipe: int) -> None:
        self._at = at
        self._pipe = pipe
        self.steps = Steps(lambda: os.kill(os.getpid(), signal.SIGKILL))
        self.steps.install()

    def report(self, word: object) -> None:
        os.write(self._pipe, f"{word} ".encode())

    def begin(self, session: sb.Session) -> None:
        launcher = Launcher.current().pid
        self.report(launcher)
        self.report(start_of(launcher))
        self.report(os.path.dirname(session._transport.host_dir))
        self.steps.arm(self._at)

    def resume(self) -> None:
        self.steps.arm(self._at - len(self.steps.seen))

    def end(self, word: str) -> None:
        self.steps.disarm()
        self.report(word)


async def private(child: Child, backend: str, _: str) -> None:
    """Checkpoints of a private work dir: layers."""
    session = await sb.on_device.session(backend=backend, warm=0).open()
    for name, text in FILES.items():
        await session.put_bytes(name, text.encode())
    child.begin(session)
    first = await session.checkpoint()
    child.report("checkpoint")
    await session.put_bytes("d/c", b"3")
    second = await session.checkpoint()
    await session.rollback(first)
    child.report("rollback")
    other = await second.fork().open()
    child.report("fork")
    await session.adopt(other)
    child.report("adopt")
    await second.drop()
    await first.drop()
    # Removal of the layers goes on in a thread.
    await asyncio.gather(*session._transport.checkpoint_calls._state.removals)
    child.end("drop")
    await other.close()
    await session.close()


async def merged(child: Child, backend: str, _: str) -> None:
    """A merge of the layers of a private work dir, in the background."""
    _layer_merging.MIN_LAYERS = 2  # type: ignore[misc]
    session = await sb.on_device.session(backend=backend, warm=0).open()
    calls = session._transport.checkpoint_calls
    for name, text in FILES.items():
        await session.put_bytes(name, text.encode())
    first = await session.checkpoint()
    await session.exec("rm a; mkdir e; ln d/b e/c; ln -s d l; mkfifo f")
    await session.checkpoint()
    child.begin(session)
    await session.exec("rm -r d; mkdir d; echo 3 > e/g")
    last = await session.checkpoint()
    child.report("checkpoint")
    await calls._state.merger._task
    assert calls._state.layers.lower[0].merged is not None
    child.report("merge")
    await session.rollback(last)
    child.report("rollback")
    await session.rollback(first)
    await last.drop()
    await asyncio.gather(*calls._state.removals)
    child.end("drop")
    await session.close()


async def pinned(child: Child, backend: str, directory: str) -> None:
    """Checkpoints of a directory of the caller: copies."""
    session = await sb.on_device.session(backend=backend, warm=0, host_work_dir=directory).open()
    child.begin(session)
    first = await session.checkpoint()
    child.report("checkpoint")
    child.steps.disarm()
    await session.put_bytes("a", b"other")
    await session.remove("d/b")
    await session.put_bytes("e/f", b"new")
    child.resume()
    await session.rollback(first)
    child.report("rollback")
    await first.drop()
    await asyncio.gather(*session._transport.checkpoint_calls._state.removals)
    child.end("drop")
    await session.close()


def import_all(backend: str) -> None:
    """Import what a child would import, so that each child does not."""
    before = {*sys.modules}
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        asyncio.run(private(Child(0, os.open(os.devnull, os.O_WRONLY)), backend, ""))
        with os.fdopen(write, "w") as pipe:
            pipe.write(" ".join(sys.modules.keys() - before))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        names = pipe.read().split()
    os.waitpid(pid, 0)
    for name in names:
        importlib.import_module(name)


def run(scenario: Any, at: int, backend: str, directory: str) -> dict[str, Any]:
    """Run a child; return what it has reported, and what it left in the caller's directory."""
    if directory:
        shutil.rmtree(directory)
        for name, text in FILES.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # Only the test itself removes what was left, so that it can be seen before.
            _workdir._swept.add(_workdir.default_parent())
            asyncio.run(scenario(Child(at, write), backend, directory))
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        launcher, started, place, *done = pipe.read().split()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    found = {
        str(path.relative_to(directory)): path.read_text()
        for path in (Path(directory).rglob("*") if directory else ())
        if path.is_file()
    }
    left = [name for name in os.listdir(place) if name.startswith(f"sandbox-{pid}-")]
    return {
        "at": at, "pid": pid, "launcher": (int(launcher), int(started)), "place": place,
        "status": status, "done": done, "found": found, "left": left,
    }  # fmt: skip


def main() -> None:
    name, backend, place, *rest = sys.argv[1:]
    _workdir._PREFERRED = place  # type: ignore[misc]
    scenario = {"private": private, "merged": merged, "pinned": pinned}[name]
    import_all(backend)
    for at in range(1, MAX_CHILDREN):
        result = run(scenario, at, backend, "".join(rest))
        print(json.dumps(result), flush=True)
        if result["status"] != -signal.SIGKILL:
            break


if __name__ == "__main__":
    main()

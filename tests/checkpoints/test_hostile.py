"""Checkpoints of a work dir whose code does its worst."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import ISOLATED, eventually, session_of

from union.sandbox._linux.owned_dir import sweep

if TYPE_CHECKING:
    from pathlib import Path

    from union import sandbox as sb

STATE = """
import json, os, stat
found = {}
for where, dirs, files in os.walk("."):
    if where == ".": dirs[:] = [d for d in dirs if d != ".sandbox-venv"]
    for name in (*dirs, *files):
        path = os.path.join(where, name)[2:]
        s = os.lstat(path)
        kind = stat.S_IFMT(s.st_mode)
        body = os.readlink(path) if stat.S_ISLNK(s.st_mode) else ""
        if stat.S_ISREG(s.st_mode): body = open(path).read()
        mode = 0o777 if stat.S_ISLNK(s.st_mode) else stat.S_IMODE(s.st_mode)
        found[path] = [kind, mode, body]
print(json.dumps(found))
"""
ACT = """
import os, random, shutil
rng = random.Random(SEED)
names = ["a", "b", "c", "d/e", "d/f", "d/g/h", "i/j", "d", "i", "d/g"]
for _ in range(20):
    one, other = rng.choice(names), rng.choice(names)
    act = rng.randrange(10)
    try:
        if act < 3: open(one, "a").write(str(rng.random()))
        elif act == 3: os.unlink(one)
        elif act == 4: shutil.rmtree(one)
        elif act == 5: os.makedirs(one, exist_ok=True)
        elif act == 6: shutil.move(one, other)
        elif act == 7: os.chmod(one, rng.choice([0o700, 0o755, 0o750]) if os.path.isdir(one)
                                else rng.choice([0o600, 0o644]))
        elif act == 8: os.symlink(other, one)
        elif act == 9: os.link(one, other)
    except (OSError, shutil.Error):
        pass
"""


async def state_of(session: sb.Session) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await session.run_code(STATE))
    return found


def changes_of(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    return {
        path: "added" if path not in old else "deleted" if path not in new else "changed"
        for path in {*old, *new}
        if old.get(path) != new.get(path)
    }


@pytest.mark.spec("L1", "L2")
@pytest.mark.threat(187)
async def test_random_changes_against_a_model(layered: sb.Session) -> None:
    """Every checkpoint is what was there, whatever came after it; every diff is exact."""
    rng = random.Random(7)
    kept: list[tuple[sb.Checkpoint, dict[str, Any]]] = []
    for round_ in range(50):
        await layered.run_code(ACT.replace("SEED", str(round_)))
        if round_ % 3 == 0:
            kept.append((await layered.checkpoint(), await state_of(layered)))
        if round_ % 5 == 4:
            checkpoint, wanted = rng.choice(kept)
            now = await state_of(layered)
            found = {one.path: one.action for one in await layered.diff(checkpoint)}
            assert found == changes_of(wanted, now)
            await layered.rollback(checkpoint)
            assert await state_of(layered) == wanted
    for checkpoint, wanted in kept:
        await layered.rollback(checkpoint)
        assert await state_of(layered) == wanted


@pytest.mark.spec("L2")
@pytest.mark.threat(187)
async def test_code_cannot_reach_or_change_a_checkpoint(layered: sb.Session) -> None:
    await layered.exec("echo low > a; ln a hard", check=True)
    checkpoint = await layered.checkpoint()
    # In place, through another name, by truncation, by a mapping, by a copied-up descriptor.
    await layered.run_code(
        """
        import mmap, os
        f = open("hard", "r+"); f.write("HARD"); f.flush()
        os.truncate("a", 2)
        with open("a", "r+b") as g:
            with mmap.mmap(g.fileno(), 0) as m: m[0:1] = b"M"
        """
    )
    # The layers are named in the table of mounts, and nothing is there.
    found = await layered.run_code(
        """
        import ctypes, os, re
        libc = ctypes.CDLL(None, use_errno=True)
        text = open("/proc/self/mountinfo").read()
        names = set(re.findall(r"(?:lowerdir\\+?|upperdir|workdir)=([^,\\s]+)", text))
        print(len([n for n in names if n.startswith("/")]),
              [n for n in names if os.path.exists(n) and n != os.getcwd()])
        print(libc.umount2(os.getcwd().encode(), 2), libc.umount2(os.getcwd().encode(), 8))
        print(libc.mount(b"none", os.getcwd().encode(), None, 32 | 4096, None))
        """
    )
    assert found.splitlines()[0].endswith("[]")
    assert found.splitlines()[1:] == ["-1 -1", "-1"]
    await layered.rollback(checkpoint)
    assert await layered.get_bytes("a") == b"low\n"
    assert await layered.get_bytes("hard") == b"low\n"


@pytest.mark.spec("L2")
@pytest.mark.threat(188)
async def test_forged_marks_of_the_file_system_hide_nothing_of_others(
    layered: sb.Session,
) -> None:
    """Attributes and devices that mean something in a layer, made before it was one.

    A file with such a mark may become unreadable; no other file does.
    """
    await layered.run_code(
        """
        import os
        os.makedirs("d/e"); open("d/e/f", "w").write("1"); open("plain", "w").write("2")
        open("marked", "w").write("3")
        for name, value in (("opaque", b"y"), ("redirect", b"/etc"), ("metacopy", b""),
                            ("whiteout", b"y"), ("origin", b"\\0" * 29), ("impure", b"y")):
            for path in ("d", "d/e", "marked", "."):
                try: os.setxattr(path, "user.overlay." + name, value)
                except OSError: pass
        try: os.mknod("white", 0o020000, 0)
        except OSError: pass
        """
    )
    before = await layered.exec("cat d/e/f plain; ls -A d d/e", check=True)
    checkpoint = await layered.checkpoint()
    after = await layered.exec("cat d/e/f plain; ls -A d d/e", check=True)
    assert after.stdout == before.stdout
    assert (await layered.exec("ls d/passwd /etc/shadow")).returncode != 0
    await layered.exec("echo 3 > plain; rm -r d; mkdir d", check=True)
    async with checkpoint.fork() as other:
        assert (await other.exec("cat d/e/f plain", check=True)).stdout == "12"
    await layered.rollback(checkpoint)
    assert (await layered.exec("cat d/e/f plain; ls -A d d/e", check=True)).stdout == before.stdout
    # Inside the layers, the marks are the kernel's own.
    made = await layered.run_code(
        """
        import os
        os.makedirs("d/mine", exist_ok=True)
        try:
            os.setxattr("d", "user.overlay.opaque", b"y"); print("set")
        except OSError: print("refused")
        try: os.mknod("d/white", 0o020000, 0); print("made")
        except OSError: print("refused")
        print(sorted(os.listdir("d")))
        """
    )
    assert made.splitlines()[1:] == ["refused", "['e', 'mine']"]


@pytest.mark.spec("L2")
@pytest.mark.threat(187)
async def test_what_a_waiting_python_runs_is_over_before_the_checkpoint(
    layered: sb.Session, tmp_path: Path
) -> None:
    """A planted start-up file runs in Pythons that wait for code; none may write later."""
    await layered.run_code(
        """
        import glob, textwrap
        site = glob.glob(".sandbox-venv/lib/python*/site-packages")[0]
        open(site + "/evil.py", "w").write(textwrap.dedent('''
            import threading, time
            def write():
                while True:
                    open("evil.log", "a").write("x")
                    time.sleep(0.001)
            threading.Thread(target=write, daemon=True).start()
        '''))
        open(site + "/evil.pth", "w").write("import evil\\n")
        """
    )
    await layered.run_code("import time; time.sleep(0.05)")
    checkpoint = await layered.checkpoint()
    taken = await layered.get_bytes("evil.log")
    await layered.run_code("import time; time.sleep(0.05)")
    assert len(await layered.get_bytes("evil.log")) > len(taken)
    async with checkpoint.fork() as other:
        # Its own Pythons write too; the checkpoint itself has not grown.
        assert (await other.exec(["/usr/bin/stat", "-c%s", "evil.log"])).returncode == 0
    await checkpoint.export(tmp_path / "evil.tar")
    with tarfile.open(tmp_path / "evil.tar") as content:
        assert content.getmember("evil.log").size == len(taken)


@pytest.mark.spec("L1")
@pytest.mark.slow
async def test_400_checkpoints_in_a_row() -> None:
    async with session_of("userns") as session:
        first = await session.checkpoint()
        kept = [first]
        for number in range(400):
            await session.put_bytes(f"f{number % 7}", str(number).encode())
            kept.append(await session.checkpoint())
        assert await session.get_bytes("f0") == b"399"
        assert {one.path for one in await session.diff(first)} == {f"f{n}" for n in range(7)}
        for number in (200, 1, 400):
            await session.rollback(kept[number])
            assert await session.get_bytes(f"f{(number - 1) % 7}") == str(number - 1).encode()
        assert await session.diff(kept[400]) == ()
        await session.rollback(first)
        assert await session.list_dir(".") == ()


KILLED = """
import asyncio, os, signal, sys
from union import sandbox as sb

async def main():
    session = await sb.on_device.session(backend=sys.argv[1]).open()
    await session.exec("mkdir d; echo 1 > d/a")
    checkpoint = await session.checkpoint()
    await session.exec("rm -r d; echo 2 > b")
    other = await checkpoint.fork().open()
    print(os.getpid(), os.path.dirname(session._transport.host_dir), flush=True)
    if sys.argv[2] == "during":
        asyncio.get_running_loop().call_later(0.002, os.kill, os.getpid(), signal.SIGKILL)
        await session.rollback(checkpoint)
        await session.checkpoint()
        await asyncio.sleep(5)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.spec("L1")
@pytest.mark.parametrize("when", ["after", "during"])
def test_a_killed_host_leaves_nothing(when: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, ISOLATED[-1], when],
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr.decode()
    pid, where = ran.stdout.decode().split()
    made = [name for name in os.listdir(where) if name.startswith(f"sandbox-{pid}-")]
    assert made

    def is_removed() -> bool:
        # Another process may be removing them, or the killed one's sandboxes are still ending.
        sweep(where)
        return not any(os.path.lexists(f"{where}/{name}") for name in made)

    assert eventually(is_removed), made

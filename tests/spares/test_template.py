"""Pythons that are forked from a template: as isolated as started ones, and apart from each other.

``test_waiting_pythons`` compares a fork with a started Python. Here a fork attacks the template,
and the template is inspected from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.conftest import children_of, eventually, session_of
from tests.posture.inspection import namespace, status

from union.sandbox._linux import host
from union.sandbox._linux.launcher import Launcher
from union.sandbox._plan import plan as p
from union.sandbox._plan.rootfs import Shown, View
from union.sandbox._plan.template import template_steps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from union import sandbox as sb
    from union.sandbox.on_device._template import Template

pytestmark = pytest.mark.spec("N1")

MAPPED = """\
[line.split() for line in open('/proc/self/maps') if line.split()[1][1::2] == 'ws']"""


def template_of(sbx: sb.Session) -> Template:
    found: Template = sbx._transport.pool.template  # type: ignore[union-attr]  # on this machine
    return found


async def ready(sbx: sb.Session) -> Template:
    """Returns when the template of the session serves forks, or was refused."""
    found = template_of(sbx)
    async with asyncio.timeout(60):
        while not (found.is_ready or found.refusal):
            await sbx.run_code("pass")
            await asyncio.sleep(0.02)
    return found


def template_pid(sbx: sb.Session) -> int:
    """Return the pid of the template: the child of the launcher in no pid namespace of its own.

    A fork is one too until it has entered its namespaces: wait for those that are being made.
    """
    launcher = Launcher._current
    assert launcher is not None
    found: list[int] = []

    def is_only_one() -> bool:
        found[:] = [pid for pid in children_of(launcher.pid) if _is(sbx, pid)]
        return len(found) == 1

    assert eventually(is_only_one), found
    return found[0]


def _is(sbx: sb.Session, pid: int, *, is_outside: bool = True) -> bool:
    """Whether a process executes the Python of the session, in no pid namespace of its own."""
    try:
        if is_outside and status(pid)["NSpid"] != f"{pid}":
            return False
        return sbx.work_dir.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False  # it has ended


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package directory of the owner, which sandboxes see read-only."""
    found = tmp_path / "packages"
    found.mkdir()
    tmp_path.chmod(0o755)
    own = host.interpreter()
    changed = dataclasses.replace(own, site_dirs=(*own.site_dirs, str(found)))
    monkeypatch.setattr(host, "interpreter", lambda: changed)
    return found


@pytest.fixture
async def forked() -> AsyncIterator[sb.Session]:
    async with session_of("userns", preload=("json", "random")) as sbx:
        assert not (await ready(sbx)).refusal
        yield sbx


# From inside.


@pytest.mark.threat(5)
async def test_a_fork_cannot_reach_the_template(forked: sb.Session) -> None:
    pid = template_pid(forked)
    out = await forked.run_code(f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
found = []
for target in ({pid}, os.getppid()):
    for name, call in {{
        "attach": lambda: libc.ptrace(16, target, None, None),
        "seize": lambda: libc.ptrace(0x4206, target, None, None),
        "kill": lambda: libc.kill(target, 9),
    }}.items():
        ctypes.set_errno(0)
        if call() == 0 and not (name == "kill" and target == 1):
            found.append((name, target))
    for name in ("mem", "maps", "environ", "root", "fd"):
        path = f"/proc/{{target}}/{{name}}"
        try:
            os.listdir(path) if name in ("fd", "root") else open(path, "rb").read(1)
        except OSError:
            continue
        found.append((name, target))
print(sorted(int(n) for n in os.listdir("/proc") if n.isdigit()), found)
""")
    assert out == "[1, 2] []\n"
    assert template_pid(forked) == pid, "the template is alive"


@pytest.mark.threat(5)
async def test_a_fork_can_trace_its_own_child(forked: sb.Session) -> None:
    """The control: what the attack uses works on a process of the sandbox."""
    out = await forked.run_code("import os; print(os.path.exists(f'/proc/{os.getpid()}/maps'))")
    assert out == "True\n"


@pytest.mark.threat(1, 5)
async def test_forks_share_no_memory_and_no_descriptor(forked: sb.Session) -> None:
    code = f"""
import json, os
numbers = {{int(n) for n in os.listdir('/proc/self/fd')}} - {{3}}
print({MAPPED}, [n for n in sorted(numbers) if 'libffi' not in os.readlink(f'/proc/self/fd/{{n}}')])
print(hasattr(json, 'planted'))
json.planted = True
json.dumps.__code__ = (lambda *a, **k: 'planted').__code__
"""
    for _ in range(3):
        assert await forked.run_code(code) == "[] [0, 1, 2]\nFalse\n"
    assert await forked.run_code("import json; print(json.dumps([1]))") == "[1]\n"
    # The control: such a mapping is found.
    seen = await forked.run_code(f"import mmap; m = mmap.mmap(-1, 4096); print(len({MAPPED}))")
    assert seen == "1\n"


@pytest.mark.threat(1, 5)
async def test_the_file_that_libffi_maps_is_of_each_fork_alone(forked: sb.Session) -> None:
    """Newer versions of libffi have one; what is written to it becomes code of callbacks."""
    code = """
import os
numbers = {int(n) for n in os.listdir('/proc/self/fd')} - {3}
names = [f'/proc/self/fd/{n}' for n in numbers]
print(*(os.stat(name).st_ino for name in names if 'libffi' in os.readlink(name)))
"""
    of_forks = [(await forked.run_code(code)).split() for _ in range(2)]
    assert not set(of_forks[0]) & set(of_forks[1])
    if os.geteuid() == 0:
        held = Path(f"/proc/{template_pid(forked)}/fd").iterdir()
        own = {str(fd.stat().st_ino) for fd in held if "libffi" in str(fd.readlink())}
        assert len(own) == len(of_forks[0])
        assert not own & {*of_forks[0], *of_forks[1]}


@pytest.mark.threat(5)
async def test_a_fork_cannot_change_the_interpreter_of_the_template(forked: sb.Session) -> None:
    """Its program and libraries are those of the template: files of mounts that are read-only."""
    out = await forked.run_code("""
import os
found = []
paths = {line.split(None, 5)[5].strip() for line in open('/proc/self/maps') if line.count('/')}
for path in ['/proc/self/exe', *(p for p in paths if not p.endswith('sandbox-template.so'))]:
    for change, *rest in ((os.open, os.O_RDWR), (os.chmod, 0o777), (os.utime,)):
        try:
            change(path, *rest)
        except OSError:
            continue
        found.append(path)
print(len(paths) > 2, found)
""")
    assert out == "True []\n"


async def test_random_numbers_differ_between_forks(forked: sb.Session) -> None:
    code = "import random; print(random.random())"
    assert len({await forked.run_code(code) for _ in range(4)}) == 4


async def test_numpy_is_seeded_again_in_each_fork() -> None:
    async with session_of("userns", preload=("numpy",)) as sbx:
        assert not (await ready(sbx)).refusal
        code = "import sys; print('numpy' in sys.modules, sys.modules['numpy'].random.rand())"
        seen = {await sbx.run_code(code) for _ in range(4)}
        assert len(seen) == 4
        assert all(line.startswith("True ") for line in seen)


async def test_forks_of_one_template_share_its_layout_and_hash_seed(forked: sb.Session) -> None:
    """As documented; ``preload=None`` is the way to have neither."""
    code = "import sys; print(id(sys), hash('text'))"
    assert len({await forked.run_code(code) for _ in range(3)}) == 1
    async with session_of("userns", preload=None) as apart:
        assert apart.isolation.python == "started"
        assert len({await apart.run_code(code) for _ in range(3)}) == 3


async def test_each_fork_is_a_process_of_its_own(forked: sb.Session) -> None:
    code = """
import os, time
fields = open('/proc/self/stat').read().rpartition(')')[2].split()
print(fields[19], os.getpid(), round(time.process_time()), os.environ['MINE'])
print(open('/proc/self/comm').read())
"""
    seen = set()
    for turn in range(50):
        out = await forked.run_code(code, env={"MINE": f"{turn}"})
        started, *rest = out.split()
        assert rest == ["2", "0", f"{turn}", "python"]
        seen.add(started)
        if len(seen) > 1:
            break
        await asyncio.sleep(0.03)  # the unit is 10 ms: two that are forked in a row may share it
    assert len(seen) > 1, "each has its own start time"


# The template itself.


@pytest.mark.threat(1, 5)
async def test_a_template_sees_nothing_that_sandboxed_code_can_write(forked: sb.Session) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can inspect a process that is closed to its own user")
    await forked.put_bytes("planted.py", b"raise SystemExit")
    pid = template_pid(forked)
    root = f"/proc/{pid}/root"
    assert os.listdir(root + forked.work_dir) == [".sandbox-venv"]
    names = {path.name for path in Path(root + forked.work_dir).rglob("site-packages/*")}
    assert {name.partition(".")[0] for name in names} - {"__pycache__"} == {
        "_union_sandbox",
        "_union_sandbox_driver",
        "_union_sandbox_template",
        "sandbox-template",
    }
    assert os.path.exists(f"{forked._transport.host_dir}/planted.py")  # type: ignore[union-attr]


@pytest.mark.threat(1, 5, 41)
async def test_a_template_holds_nothing_of_the_host(forked: sb.Session) -> None:
    pid = template_pid(forked)
    found = status(pid)
    assert found["NoNewPrivs"] == "1"
    # CAP_SYS_CHROOT and CAP_SYS_ADMIN, in the user namespace that the sandboxes share.
    assert int(found["CapEff"], 16) == int(found["CapPrm"], 16) == 1 << 18 | 1 << 21
    assert os.stat(f"/proc/{pid}/environ").st_uid != int(found["Uid"].split()[0]), "not dumpable"
    if os.geteuid() != 0:
        return  # the rest is closed to its own user
    for name in ("user", "mnt", "net", "ipc", "uts"):
        assert namespace(pid, name) != namespace("self", name), name
    held = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert set(held) == {0, 1, 2, 3, 4}
    assert held[0] == "/dev/null"
    assert all(held[fd].startswith("socket:") for fd in (3, 4))
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    constants = ["LANG=C.UTF-8", "LC_ALL=C.UTF-8", "LD_BIND_NOW=1"]
    assert environment == [*constants, f"HOME={forked.work_dir}", ""]


async def test_a_template_ends_with_its_session() -> None:
    async with session_of("userns", preload=("json",)) as sbx:
        await ready(sbx)
        pid = template_pid(sbx)
    assert eventually(lambda: not os.path.exists(f"/proc/{pid}"))


async def test_a_session_that_ends_before_its_template_is_ready_logs_nothing(
    packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (packages / "lengthy.py").write_text("import time; time.sleep(0.5)\n")
    options = {"preload": ("lengthy",), "read_only_paths": [str(packages)]}
    async with session_of("userns", **options) as sbx:
        assert await sbx.run_code("print(1)") == "1\n"
        assert not template_of(sbx).is_ready
    assert not caplog.messages


async def test_a_session_goes_on_after_its_template_was_killed(forked: sb.Session) -> None:
    if os.geteuid() != 0:
        pytest.skip("its own user may not signal a process with another id")
    pid = template_pid(forked)
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(40):
        while template_of(forked).is_ready:
            await asyncio.sleep(0.005)
    assert await forked.run_code("print(1)") == "1\n"
    assert not (await ready(forked)).refusal
    assert template_pid(forked) != pid
    assert await forked.run_code("print(2)") == "2\n"


# Modules that cannot be shared.


@pytest.mark.parametrize(
    "source, reason",
    [
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(99,)).start()",
            "thread",
        ),
        ("import mmap; memory = mmap.mmap(-1, 4096)", "shared memory"),
        ("import socket; ends = socket.socketpair()", "keeps a file open"),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit(3)", "SystemExit"),
    ],
)
async def test_a_module_that_forks_cannot_share_is_refused(
    packages: Path, source: str, reason: str
) -> None:
    (packages / "unshareable.py").write_text(source + "\n")
    async with session_of(
        "userns", preload=("unshareable",), read_only_paths=[str(packages)]
    ) as sbx:
        found = await ready(sbx)
        assert found.refusal.startswith("unshareable ")
        assert reason in found.refusal
        proc = await sbx.run("print('goes on')", script_type="python", stdout=True)
        assert await proc.communicate() == (b"goes on\n", b"")
        assert proc.isolation.python == "started"


async def test_threads_that_end_before_a_fork_are_no_reason(packages: Path) -> None:
    """OpenBLAS does this by pthread_atfork: it starts its threads again when they are needed."""
    (packages / "careful.py").write_text(
        "import os, threading\n"
        "end = threading.Event()\n"
        "helper = threading.Thread(target=end.wait)\n"
        "helper.start()\n"
        "os.register_at_fork(before=lambda: (end.set(), helper.join()))\n"
    )
    async with session_of("userns", preload=("careful",), read_only_paths=[str(packages)]) as sbx:
        assert not (await ready(sbx)).refusal
        assert await sbx.run_code("import threading; print(threading.active_count())") == "1\n"


# The session venv.


@pytest.mark.threat(5)
async def test_modules_of_the_session_venv_are_never_imported_in_the_template(
    packages: Path,
) -> None:
    (packages / "known.py").write_text("VALUE = 'of the owner'\n")
    async with session_of("userns", preload=("known",), read_only_paths=[str(packages)]) as sbx:
        await ready(sbx)
        assert await sbx.run_code("import known; print(known.VALUE)") == "of the owner\n"
        place = "import pathlib, sysconfig; p = pathlib.Path(sysconfig.get_path('purelib'))\n"
        # A version of its own, and a file that Python executes at its start.
        await sbx.run_code(place + "(p / 'known.py').write_text('VALUE = \"of the session\"')")
        code = "import known, sys; print(known.VALUE, getattr(sys, 'started', None))"
        assert await sbx.run_code(code) == "of the session None\n"
        await sbx.run_code(place + "(p / 'a.pth').write_text('import sys; sys.started = 1')")
        assert await sbx.run_code(code) == "of the session 1\n"
        await sbx.run_code(place + "(p / 'known.py').unlink()")
        assert await sbx.run_code(code) == "of the owner 1\n"
    async with session_of("userns", preload=("planted",)) as sbx:
        await sbx.run_code(place + "(p / 'planted.py').write_text('')")
        assert "planted cannot be imported" in (await ready(sbx)).refusal


async def forked_and_fresh(
    work: Path, files: dict[Path, bytes], code: str, *, env: dict[str, str] | None = None
) -> tuple[tuple[str, int], tuple[str, int]]:
    """What a program prints and its exit code, in a fork and in a Python that is started for it."""
    results = []
    for options in ({"preload": ("json",)}, {"warm": 0}):
        async with session_of("userns", host_work_dir=str(work), **options) as sbx:
            if "preload" in options:
                await ready(sbx)
                assert sbx.isolation.python == "forked"
                for path, content in files.items():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content)
                await sbx.exec("pass", script_type="python")  # one that waits has begun before
            done = await sbx.exec(code, script_type="python", env=env)
            results.append((done.stdout, done.returncode))
    return results[0], results[1]


COUNTED = b"import sys; sys.count = getattr(sys, 'count', 0) + 1\n"
START = "import site, sys; print(getattr(sys, 'count', 0), site.USER_SITE, sys.path)"


async def packages_of(work: Path) -> Path:
    async with session_of("userns", host_work_dir=str(work)) as sbx:
        return Path(
            (await sbx.run_code("import sysconfig as s; print(s.get_path('purelib'))")).strip()
        )


@pytest.mark.parametrize("env", [None, {"HOME": "/tmp"}])
@pytest.mark.parametrize("name", ["a.pth", "sitecustomize.py"])
async def test_files_of_the_start_take_effect_as_often_as_in_a_fresh_python(
    tmp_path: Path, name: str, env: dict[str, str] | None
) -> None:
    files = {await packages_of(tmp_path) / name: COUNTED}
    in_fork, fresh = await forked_and_fresh(tmp_path, files, START, env=env)
    assert in_fork == fresh
    assert fresh[0].split()[0] != "0"


@pytest.mark.parametrize("name", ["sitecustomize.py", "sitecustomize/__init__.py"])
async def test_customization_in_the_work_dir_is_executed(tmp_path: Path, name: str) -> None:
    in_fork, fresh = await forked_and_fresh(tmp_path, {tmp_path / name: COUNTED}, START)
    assert in_fork == fresh
    assert fresh[0].split()[0] == "1"


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.pth", b"import sys; sys.exit(3)"),
        ("A.pth", b"import sys; sys.exit(3)"),
        ("a.pth", b"\xff\xfe\0"),
        ("sitecustomize.py", b"raise SystemExit(5)"),
        ("sitecustomize.py", b"raise KeyboardInterrupt"),
    ],
)
async def test_files_with_which_python_does_not_start_let_no_fork_start(
    tmp_path: Path, name: str, content: bytes
) -> None:
    files = {await packages_of(tmp_path) / name: content}
    in_fork, fresh = await forked_and_fresh(tmp_path, files, "print('started')")
    assert in_fork == fresh == ("", 1)


@pytest.mark.parametrize("is_there", [True, False])
async def test_packages_of_the_user_are_seen_as_by_a_fresh_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    """Of a user inside; a Python outside of any venv has them."""
    python = dataclasses.replace(host.interpreter(), sees_system=True)
    monkeypatch.setattr(host, "interpreter", lambda: python)
    packages = tmp_path / f".local/lib/python{python.version}/site-packages"
    customized = b"import sys; sys.path.append('customized')"
    files = {packages / "counted.pth": COUNTED, packages / "usercustomize.py": customized}
    in_fork, fresh = await forked_and_fresh(tmp_path, files if is_there else {}, START)
    assert in_fork == fresh
    assert (fresh[0].split()[0], "customized" in fresh[0]) == (str(int(is_there)), is_there)


@pytest.mark.threat(5)
@pytest.mark.parametrize("name", [None, "/elsewhere"])
async def test_there_is_no_template_if_its_packages_are_in_a_writable_place(
    packages: Path, name: str | None
) -> None:
    (packages / "known.py").write_text("")
    options = {"host_work_dir": str(packages.parent), "work_dir_name": name}
    async with session_of("userns", preload=("known",), **options) as sbx:
        await sbx.run_code("pass")
        await sbx.run_code("pass")
        assert sbx.isolation.python == "started"
        assert not template_of(sbx).is_ready


# Contexts, and sessions without a template.


async def test_contexts_start_from_the_template(forked: sb.Session) -> None:
    async with forked.context() as ctx:
        result = await ctx.run("import sys; print('json' in sys.modules, hash('text'))")
        assert result.stdout.startswith("True ")
    assert await forked.run_code("print('True', hash('text'))") == result.stdout


async def test_other_sessions_start_their_pythons() -> None:
    async with contextlib.AsyncExitStack() as stack:
        for way, options in (
            ("landlock", {}),
            ("none", {}),
            ("userns", {"warm": 0}),
            ("bubblewrap", {"preload": None}),
        ):
            sbx = await stack.enter_async_context(session_of(way, **options))
            await sbx.run_code("pass")
            assert await sbx.run_code("print(1)") == "1\n"
            assert sbx.isolation.python == "started"
            assert not template_of(sbx).is_ready


async def test_bwrap_builds_the_root_of_a_template_too() -> None:
    async with session_of("bubblewrap", preload=("json",)) as sbx:
        assert not (await ready(sbx)).refusal
        assert sbx.isolation.python == "forked"
        code = "import sys; print('json' in sys.modules, hash('text'))"
        seen = {await sbx.run_code(code) for _ in range(2)}
        assert len(seen) == 1
        assert seen.pop().startswith("True ")


def test_everything_writable_is_covered() -> None:
    view = View(
        system=(),
        links=(),
        files=(),
        added=(
            Shown(source="/w", path="/w", writable=True),
            Shown(source="/w/below", path="/w/below", writable=True),
            Shown(source="/one", path="/one", writable=True, is_dir=False),
            Shown(source="/read", path="/read"),
        ),
        fresh_proc=True,
        guarded_proc=(),
        work_dir="/w",
        staging="/",
        pivot=True,
        tmp_bytes=1,
        shm_bytes=1,
    )
    steps = template_steps(view, files={"/w/a/b": b""}, links={"/w/a/c": "/d"})
    mounted = [step.path for step in steps if isinstance(step, p.Tmpfs)]
    assert mounted == ["/tmp", "/dev/shm", "/run/sandbox", "/w"]
    assert [step.path for step in steps if isinstance(step, p.Cover)] == ["/one"]
    assert [step.path for step in steps if isinstance(step, p.Mkdir)] == ["/w/a"]


def faults(pid: int) -> int:
    """Return how many pages a process has been given one by one; 0 for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[7])


def waiting_fork(sbx: sb.Session) -> int | None:
    """Return the pid of the Python that waits for a script, if there is one."""
    launcher = Launcher._current
    assert launcher is not None
    inside = (pid for runner in children_of(launcher.pid) for pid in children_of(runner))
    return next((pid for pid in inside if _is(sbx, pid, is_outside=False)), None)


async def test_a_fork_copies_its_memory_while_it_waits(forked: sb.Session) -> None:
    # Each page that is copied on first use interrupts the script: several hundred of them.
    read_own = "s = open('/proc/self/stat').read(); print(s[s.rindex(')') + 2:].split()[7])"
    before = -1
    async with asyncio.timeout(60):
        while (pid := waiting_fork(forked)) is None or faults(pid) != before or before < 100:
            if pid is None:
                await forked.run_code("pass")  # the next one is prepared after a command
            before = -1 if pid is None else faults(pid)
            await asyncio.sleep(0.1)  # it waits when no more pages are added
    taken = int(await forked.run_code(read_own)) - before
    assert 0 <= taken < 60, (before, taken)


async def test_the_rehearsal_of_a_template_has_ended(forked: sb.Session) -> None:
    assert not children_of(template_pid(forked))

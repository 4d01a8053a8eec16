"""The synchronous face in a process of its own: Ctrl-C, interpreter exit, fork, notebooks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from tests.conftest import eventually

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
import os, signal, sys, threading, time
from union.sandbox import sync

def session():
    return sync.on_device.session(backend="userns")
"""


def program(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", HEAD + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(body: str, *, code: int = 0) -> str:
    process = program(body)
    out, err = process.communicate(timeout=40)
    assert process.returncode == code, err
    assert err == ""
    return out


def left(pid: int) -> list[str]:
    return [
        name
        for place in ("/tmp", "/var/tmp")
        for name in os.listdir(place)
        if name.startswith(f"sandbox-{pid}-")
    ]


WAITS = {
    "exec": "sbx.exec('touch up; sleep 60')",
    "run": "sbx.run('touch up; sleep 60')",
    "run_code": 'sbx.run_code(\'import time; open("up", "w"); time.sleep(60)\')',
    "communicate": "sbx.run('touch up; sleep 60', stdout=True).communicate()",
    "wait": "sbx.run('touch up; sleep 60', background=True).wait()",
    "lines": "list(sbx.run('touch up; sleep 60', stdout=True).iter_stdout_lines())",
}


@pytest.mark.spec("O1")
@pytest.mark.parametrize("call", WAITS)
def test_ctrl_c_ends_the_command(call: str) -> None:
    process = program(
        f"""
        with session() as sbx:
            def interrupt():
                while not sbx.exists("up"):
                    time.sleep(0.02)
                print("up", flush=True)
            threading.Thread(target=interrupt).start()
            try:
                {WAITS[call]}
            except KeyboardInterrupt:
                deadline = time.monotonic() + 10
                running = sbx._target._processes
                while running and time.monotonic() < deadline:
                    time.sleep(0.01)
                print("interrupted", len(running), sbx.exec("echo usable").stdout)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=40)
    assert out == "interrupted 0 usable\n\n", err
    assert (process.returncode, err) == (0, "")


@pytest.mark.spec("O1")
def test_ctrl_c_while_a_session_opens_leaves_nothing() -> None:
    process = program(
        """
        threading.Thread(target=lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            with session() as sbx:
                while True:
                    sbx.exec("sleep 0.1")
        except KeyboardInterrupt:
            print("interrupted")
        """
    )
    out, err = process.communicate(timeout=40)
    assert process.returncode in {0, 1, 130, -2}, err
    assert out == "interrupted\n" or "KeyboardInterrupt" in err
    assert left(process.pid) == []


EXITS = {
    "open": "sbx = session().open(); sbx.exec('true')",
    "running": "sbx = session().open(); p = sbx.run('sleep 60', background=True)",
    "exception": "sbx = session().open(); sbx.exec('true'); sys.exit(0)",
    "two": "a = session().open(); b = session().open(); b.exec('true')",
    "thread": (
        "sbx = session().open()\n"
        "threading.Thread(target=lambda: sbx.exec('sleep 0.3'), daemon=False).start()"
    ),
    "daemon": (
        "sbx = session().open()\n"
        "threading.Thread(target=lambda: sbx.run('sleep 60'), daemon=True).start()\n"
        "time.sleep(0.3)"
    ),
}


@pytest.mark.spec("O1")
@pytest.mark.parametrize("way", EXITS)
def test_interpreter_exit_leaves_nothing_behind(way: str) -> None:
    process = program("print(os.getpid(), flush=True)\n" + EXITS[way])
    out, err = process.communicate(timeout=40)
    assert process.returncode == 0, err
    if way != "daemon":  # its thread sees the end of its call, or nothing at all
        assert err == ""
    assert left(int(out)) == []
    found = subprocess.run(["pgrep", "-P", out.strip()], capture_output=True, check=False)
    assert found.stdout == b""


@pytest.mark.spec("O1")
def test_a_call_after_the_end_is_refused_with_the_reason() -> None:
    out = finished(
        """
        import atexit
        def late():
            try:
                sbx.exec("true")
            except sync.SandboxUsageError as exc:
                print(exc.code)
        atexit.register(late)
        sbx = session().open()
        """
    )
    assert out == "interpreter-exit\n"


@pytest.mark.spec("O1")
def test_a_forked_child_gets_a_portal_of_its_own() -> None:
    out = finished(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # fork() with threads, since 3.12
        unused = session()
        with session() as sbx:
            sbx.put_bytes("f", b"parent")
            child = os.fork()
            if child == 0:
                try:
                    sbx.exec("true")
                except sync.SandboxUsageError as exc:
                    print(exc.code, flush=True)
                with unused as own:
                    print(own.exec("echo child").stdout, end="", flush=True)
                del sbx
                sys.exit(0)
            _, status = os.waitpid(child, 0)
            print(os.waitstatus_to_exitcode(status), sbx.get_bytes("f").decode())
            print(sbx.exec("echo parent goes on").stdout, end="")
        """
    )
    assert out.splitlines() == ["forked-session", "child", "0 parent", "parent goes on"]


@pytest.mark.spec("O1")
def test_importing_it_starts_nothing() -> None:
    out = finished(
        """
        before = len(os.listdir("/proc/self/fd")), threading.active_count()
        unopened = session()
        sync.Session, sync.SandboxProcess
        assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
        print("flyte" in sys.modules, "aiohttp" in sys.modules)
        """
    )
    assert out == "False False\n"


CELLS = [
    """
from union import sandbox as sb
from union.sandbox import sync
sbx = sync.on_device.session(backend="userns").open()
sbx.put_bytes("f", b"one")
""",
    """
print(sbx.exec("cat f").stdout)
for line in sbx.run("echo two; echo three", stdout=True).iter_stdout_lines():
    print(line)
""",
    """
other = await sb.on_device.session(backend="userns").open()
print((await other.exec("echo four")).stdout, end="")
""",
    """
process = await other.run("echo five", stdout=True)
async for line in process.iter_stdout_lines():
    print(line)
""",
    """
import os, signal, threading, time
def interrupt():
    while not sbx.exists("up"):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    sbx.exec("touch up; sleep 60")
except KeyboardInterrupt:
    print("interrupted", sbx.exec("echo six").stdout, end="")
""",
    """
await other.close()
print(sbx.work_dir)
""",
]


@pytest.mark.spec("O1")
@pytest.mark.timeout(120)
def test_a_notebook_uses_both_faces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    kernels = tmp_path / "kernels" / "here"
    kernels.mkdir(parents=True)
    (kernels / "kernel.json").write_text(
        json.dumps(
            {
                "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
                "display_name": "here",
                "language": "python",
            }
        )
    )
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(book, kernel_name="here", timeout=60).execute()
    texts = [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in book.cells
    ]
    assert texts[1] == "one\ntwo\nthree\n"
    assert texts[2:5] == ["four\n", "five\n", "interrupted six\n"]
    work_dir = texts[5].strip()
    assert work_dir
    # The session of the synchronous face was never closed: the end of the kernel does it.
    assert eventually(lambda: not os.path.exists(work_dir), within_s=20)

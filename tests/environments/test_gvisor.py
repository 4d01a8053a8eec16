"""Sessions inside gVisor: attacks on what its kernel does differently, and some contract tests.

`make test-gvisor` runs the whole suites there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.environments import gvisor_counts, pod, runsc
from tests.environments.gvisor_counts import PAGE
from tests.environments.gvisor_suites import OPTIONS, PLACES, inside
from tests.environments.places import open_pod
from tests.environments.suite import BUILD_LIMIT_S, staged_suite, user_venv
from tests.environments.test_suite_elsewhere import counts

LIMIT_S = 240.0

# Everything in one container, because starting it takes most of the time.
ATTACKS = r"""
import asyncio, json, os, sys
from union import sandbox as sb

INIT = '''
import ctypes, os, signal
libc = ctypes.CDLL(None, use_errno=True)
def tried(call):
    try:
        return "ok" if call() in (None, 0) else os.strerror(ctypes.get_errno())
    except OSError as error:
        return error.strerror
print(tried(lambda: os.kill(1, 9)))
print(tried(lambda: libc.syscall(234, 1, 1, 9)))
print(tried(lambda: libc.syscall(200, 1, 9)))
print(tried(lambda: signal.pidfd_send_signal(os.pidfd_open(1), 9)))
'''
CHANGES = '''
import os, sys
def tried(call, *args):
    try:
        call(*args)
    except OSError as error:
        return os.strerror(error.errno)
    return "ok"
path = sys.argv[1]
print(tried(os.truncate, path, 0), tried(os.open, path, os.O_RDONLY | os.O_TRUNC),
      tried(os.open, path, os.O_WRONLY), tried(os.chmod, path, 0o600),
      tried(os.utime, path, (1, 1)), tried(os.setxattr, path, "user.x", b"x"), sep="|")
'''
CONNECT = '''
import socket
for address in ("192.0.2.1", "169.254.169.254"):
    with socket.socket() as sock:
        sock.settimeout(10)
        try:
            sock.connect((address, 80))
            sock.sendall(b"GET / HTTP/1.0\\r\\nHost: x\\r\\n\\r\\n")
            print("data" if sock.recv(100) else "closed")
        except OSError as error:
            print("refused")
'''
FILL = '''
import time
held = []
for _ in range(60):
    held.append(b"x" * (8 << 20)); time.sleep(0.05)
print("never")
'''

def error_of(exc):
    return [type(exc).__name__, exc.code, str(exc.args[0])]

async def main():
    out = {}
    os.makedirs("/home/user/shown", exist_ok=True)
    for path in ("/home/user/shown/file", "/home/user/secret"):
        with open(path, "w") as file:
            file.write("content")
    async with sb.on_device.session(backend="userns", read_only_paths=["/home"]) as sbx:
        out["isolation"] = sbx.isolation.to_dict()
        done = await sbx.exec(INIT + "raise SystemExit(7)", script_type="python")
        out["init"] = [done.returncode, done.stdout.split("\n")[:4], done.termination_reason]
        await sbx.exec("mkdir plain; touch plain/file; ln -s /home/user leads; ln -s leads twice")
        out["listed"] = [entry.path for entry in await sbx.list_dir("plain")]
        for name in ("leads", "twice", "leads/shown"):
            try:
                out[name] = [entry.path for entry in await sbx.list_dir(name)]
            except sb.SandboxError as exc:
                out[name] = error_of(exc)
        await sbx.remove("leads")
        out["after removal"] = os.path.exists("/home/user/secret")
        await sbx.put_bytes("changes.py", CHANGES.encode())
        python = [sys.executable, "changes.py"]
        for name, path in {"shown": "/home/user/shown/file", "passwd": "/etc/passwd"}.items():
            out[name] = (await sbx.exec([*python, path])).stdout.strip().split("|")
        # /home/user is a mount of its own, writable in the container.
        out["below"] = (await sbx.exec("echo x > /home/user/new || echo refused")).stdout
        out["control"] = (await sbx.exec("echo x > own && cat own")).stdout
        filled = await sbx.exec(
            FILL, script_type="python", resources=sb.Resources(memory="64Mi"), timeout_s=60
        )
        out["filled"] = [filled.termination_reason, filled.stdout]
    with open("/home/user/shown/file") as file:
        out["content"] = file.read()
    os.makedirs("/tmp/shown", exist_ok=True)
    try:
        async with sb.on_device.session(backend="userns", read_only_paths=["/tmp/shown"]) as sbx:
            out["tmpfs"] = sbx.isolation.read_only
    except sb.SandboxError as exc:
        out["tmpfs"] = error_of(exc)
    async with sb.on_device.session(
        backend="userns", network_mode="allowlist", network_allowlist=["example.com"]
    ) as sbx:
        proc = await sbx.run(CONNECT, script_type="python", stdout=True)
        text, _ = await proc.communicate_text()
        out["egress"] = sbx.isolation.egress
        out["connect"] = text.split()
        out["decisions"] = [[d.host, d.port, d.allowed] for d in proc.network]
    print(json.dumps(out))

asyncio.run(main())
"""


def attacked(who: str) -> dict[str, Any]:
    shape, venv = inside(PLACES[who]), user_venv()
    env = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "VIRTUAL_ENV": str(venv)}
    with open_pod("gvisor", shape, readable=[venv]) as place:
        done = place.run(
            [str(venv / "bin/python"), "-c", ATTACKS], env=env, cwd=Path("/"), timeout_s=LIMIT_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.left_behind == 0
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.spec("P1", "G2", "B9", "E3")
@pytest.mark.threat(11, 20, 28, 32)
@pytest.mark.timeout(LIMIT_S + BUILD_LIMIT_S)
@pytest.mark.parametrize("who", PLACES)
def test_attacks_are_blocked_inside_gvisor(who: str) -> None:
    found = attacked(who)
    report = found["isolation"]
    assert report["namespaces"] == ["user", "mount", "pid", "ipc", "uts", "net"]
    assert (report["root"], report["proc"], report["no_new_privs"]) == ("pivot", "fresh", True)
    assert report["capabilities"] == []
    assert report["ids"] == ("unprivileged" if who == "root" else "caller")

    code, refused, reason = found["init"]
    assert (code, reason) == (7, ""), "the exit code is the command's own"
    assert refused == ["Operation not permitted"] * 3 + ["Function not implemented"]

    assert found["listed"] == ["plain/file"]
    for name in ("leads", "twice", "leads/shown"):
        assert "link" in found[name][2], found[name]
    assert found["after removal"]

    for name in ("shown", "passwd"):
        truncate, cut, write, *_, attribute = found[name]
        assert (truncate, cut) == ("Operation not permitted",) * 2
        assert write in {"Read-only file system", "Permission denied"}
        assert attribute == "Function not implemented"
    assert "ok" not in found["shown"], "its mode and times too: it is not on a tmpfs"
    assert found["content"] == "content"
    assert found["below"] == "refused\n"
    assert found["control"] == "x\n"
    assert found["filled"] == ["oom", ""]
    if who == "root":
        assert found["tmpfs"] == "full", "an id of its own owns nothing there"
    else:
        assert found["tmpfs"][:2] == ["PolicyError", "policy"]
        assert "on a tmpfs" in found["tmpfs"][2]

    assert found["egress"] == "kernel"
    assert "data" not in found["connect"]
    assert len(found["connect"]) == 2
    assert found["decisions"] == [["192.0.2.1", 80, False], ["169.254.169.254", 80, False]]


CONTRACT = (
    "tests/contract/test_basics.py",
    "tests/contract/test_run.py",
    "tests/contract/test_stdin.py",
)


@pytest.mark.spec("P1", "C1", "D8")
@pytest.mark.elsewhere
@pytest.mark.timeout(LIMIT_S + BUILD_LIMIT_S)
def test_part_of_the_contract_holds_inside_gvisor() -> None:
    shape = inside(PLACES["uid 1000"])
    with staged_suite() as suite, open_pod("gvisor", shape, readable=suite.readable) as place:
        command = [suite.python, "-m", "pytest", *OPTIONS, "-m", "not slow and not bare"]
        command += [f"--basetemp={pod.HOME}/pytest", *CONTRACT]
        done = place.run(command, env=suite.environment(), cwd=suite.root, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert counts(done.stdout)["passed"] > 30


def test_the_page_has_the_counts_and_every_exception() -> None:
    """To write it: python -m tests.environments.test_gvisor."""
    page = PAGE.read_text("utf-8")
    assert gvisor_counts.rewritten(page) == page


def test_the_page_names_what_failed_and_what_has_no_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted = {"tests/network/test_names.py": {"passed": 3, "failed": 2, "exception: errno": 1}}
    places = {"root": counted}
    absent = gvisor_counts._absent(places)
    kept = {"date": "2026-01-02", "places": places, "absent": absent}
    monkeypatch.setattr(gvisor_counts, "kept", lambda: kept)
    page = gvisor_counts.rewritten(PAGE.read_text("utf-8"))
    assert "Failed as root: `tests/network/test_names.py` (2)." in page
    assert "Failed as uid 1000" not in page
    assert "Without a result as uid 1000: `tests/contract`, " in page
    assert "| `tests/network` | 0 | 0 | 3 | 1 |" in page


def test_results_are_counted_by_module_and_exceptions_by_fact() -> None:
    printed = """\
PASSED tests/contract/test_run.py::test_one[userns]
PASSED tests/contract/test_run.py::test_two[a - b]
XFAIL tests/contract/test_pty.py::test_job - terminals: a devpts has no limit
XFAIL at setup of tests/escape/test_call_paths.py::test_swap - [NOTRUN] exchange: renameat2 has none
XFAIL tests/escape/test_call_paths.py::test_other - some reason
SKIPPED [3] tests/contract/test_run.py:12: no tool
FAILED tests/contract/test_run.py::test_three - assert 1 == 2
ERROR at teardown of tests/contract/test_run.py::test_four - OSError
XPASS tests/contract/test_pty.py::test_more - terminals: x
2 passed in 1 s
"""
    assert gvisor_counts.by_module(printed) == {
        "tests/contract/test_pty.py": {"exception: terminals": 1, "passed": 1},
        "tests/contract/test_run.py": {"failed": 2, "passed": 2, "skipped": 3},
        "tests/escape/test_call_paths.py": {"exception: exchange": 1, "xfailed": 1},
    }


def test_a_missing_runsc_is_named_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(runsc.VARIABLE, str(tmp_path / "none"))
    assert runsc.VARIABLE in (runsc.lacking() or "")
    monkeypatch.delenv(runsc.VARIABLE)
    monkeypatch.setattr(runsc, "PROJECT", tmp_path / "a" / "b")
    reason = runsc.lacking() or ""
    assert runsc.VARIABLE in reason
    assert "release-20260622" in reason
    (tmp_path / "a" / "shared" / "tools").mkdir(parents=True)
    (tmp_path / "a" / "shared" / "tools" / "runsc.xz").touch()
    assert runsc.lacking() is None


if __name__ == "__main__":
    gvisor_counts.write_page(PAGE)

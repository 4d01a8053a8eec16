"""Each example prints the output in its docstring and leaves nothing behind."""

from __future__ import annotations

import ast
import contextlib
import doctest
import fcntl
import functools
import http.client
import http.server
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.network import services

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_S = 110
LEFTOVERS = 99

# Run a program as a subreaper, to find processes that outlive it. Sandboxes may end a bit later.
WATCHED = f"""
import ctypes, fcntl, glob, os, signal, subprocess, sys, termios, time

at_terminal = os.getsid(0) == os.getpid() and os.isatty(0)
if at_terminal:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C is a signal, to the program as well
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
for number in (signal.SIGINT, signal.SIGTERM):
    # A handler, which a started program does not inherit, as it would inherit "ignored".
    signal.signal(number, lambda number, _: at_terminal or program.send_signal(number))
program = subprocess.Popen(sys.argv[1:])
code = program.wait()
end = time.monotonic() + float(os.environ.get("WATCHED_PATIENCE_S", "5"))
left = True
while left and time.monotonic() < end:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        left = ["processes"]
    except ChildProcessError:
        name = f"sandbox-{{program.pid}}-*"
        left = glob.glob(f"/tmp/{{name}}") + glob.glob(f"/var/tmp/{{name}}")
    time.sleep(0.02)
if left:
    print("left behind:", left, file=sys.stderr)
sys.exit({LEFTOVERS} if left else code)
"""


def watched(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", WATCHED, sys.executable, str(EXAMPLES / name), *arguments]


def run(name: str, *arguments: str, where: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        watched(name, *arguments),
        check=False,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=where,
        env={**os.environ, **env},
    )


def promised(name: str) -> str:
    """Return the expected output from the docstring of an example."""
    docstring = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8")))
    return textwrap.dedent((docstring or "").partition("Prints::\n\n")[2]) + "\n"


def assert_as_promised(name: str, printed: str) -> None:
    """Compare the output; three dots in the docstring match anything."""
    checker = doctest.OutputChecker()
    assert checker.check_output(promised(name), printed, doctest.ELLIPSIS), (
        f"{name} promises:\n{promised(name)}\nand prints:\n{printed}"
    )


PLAIN = [
    "quickstart.py",
    "data_task.py",
    "fan_out.py",
    "best_of_16.py",
    "data_analysis.py",
    "live_output.py",
    "plugin_runner.py",
    "agent/agent.py",
]
WITH_A_SEPARATE_TEST = ["demo.py", "agent/model_server.py", "locked_packages.py", "web_app.py"]
NO_PROGRAM = ["agent/tools.py"]


def test_every_example_is_run():
    found = {
        path.relative_to(EXAMPLES).as_posix()
        for path in EXAMPLES.rglob("*.py")
        if "flyte" not in path.parts  # These have separate tests.
    }
    assert found == {*PLAIN, *WITH_A_SEPARATE_TEST, *NO_PROGRAM}


@pytest.mark.parametrize("name", PLAIN)
def test_output_matches_the_docstring(name: str, tmp_path: Path):
    done = run(name, where=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert_as_promised(name, done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_another_backend_can_be_chosen(tmp_path: Path):
    if shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed: apt-get install bubblewrap")
    done = run("quickstart.py", "--backend", "bubblewrap", where=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert_as_promised("quickstart.py", done.stdout)


def test_leftovers_are_detected(tmp_path: Path):
    program = tmp_path / "leaves.py"
    program.write_text(
        "import subprocess as s; s.Popen(['sleep', '2'], stdout=s.DEVNULL, stderr=s.DEVNULL)"
    )
    done = run(str(program), where=tmp_path, WATCHED_PATIENCE_S="0.2")
    assert (done.returncode, "left behind" in done.stderr) == (LEFTOVERS, True)


# The agent.


def test_the_agent_gives_up_on_an_unreachable_model(tmp_path: Path):
    url = "http://127.0.0.1:1/v1/chat/completions"
    done = run("agent/agent.py", where=tmp_path, MODEL_URL=url, MODEL_NAME="m", MODEL_KEY="k")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("not reached") == 4
    assert done.stdout.endswith("gave up: no answer in 4 tries\n")


def test_the_agent_sends_name_and_key_to_the_configured_model(tmp_path: Path):
    seen: list[tuple[str | None, dict]] = []

    class Real(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.headers["Authorization"], body))
            answer = b'{"choices": [{"message": {"role": "assistant", "content": "42"}}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            """Log nothing."""

    with serving(Real, "127.0.0.1") as address:
        url = f"http://{address}/chat"
        arguments = ("agent/agent.py", "What is the answer?")
        done = run(
            *arguments, where=tmp_path, MODEL_URL=url, MODEL_NAME="large", MODEL_KEY="secret"
        )
    assert (done.returncode, done.stdout, done.stderr) == (0, "answer: 42\n", "")
    [(key, body)] = seen
    assert (key, body["model"]) == ("Bearer secret", "large")
    assert body["messages"][-1]["content"] == "What is the answer?"
    names = [tool["function"]["name"] for tool in body["tools"]]
    assert names == ["run_python", "run_shell", "write_file", "read_file"]


def test_the_model_server_requires_errors_to_be_returned(tmp_path: Path):
    with begun("agent/model_server.py", where=tmp_path) as program:
        line = program.stdout.readline()
        assert_as_promised("agent/model_server.py", line)
        host, _, path = line.split("//")[1].strip().partition("/")
        statuses = []
        for content in ("euros", "euros", "", "unrelated text"):
            connection = http.client.HTTPConnection(host, timeout=10)
            body = {"messages": [{"role": "user", "content": content}], "tools": [1]}
            connection.request("POST", f"/{path}", json.dumps(body))
            statuses.append(connection.getresponse().status)
            connection.close()
        # A failure to retry, the first turn, a truncated reply (to retry), then the missing text.
        assert statuses == [500, 200, 200, 400]
        program.send_signal(signal.SIGINT)
        assert program.wait(10) == 0


# Live output.


def at_a_terminal(
    *arguments: str, where: Path, keys: bytes = b"", after: str = ""
) -> tuple[int, str]:
    """Run it on a terminal; send ``keys`` after the output contains ``after``."""
    terminal, far = pty.openpty()
    # A new terminal has the window size 0.
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    program = subprocess.Popen(
        watched(*arguments), stdin=far, stdout=far, stderr=far, cwd=where, start_new_session=True
    )
    os.close(far)
    seen, end = b"", time.monotonic() + LIMIT_S
    with contextlib.suppress(OSError):  # Linux reports the end of a terminal as an error.
        while time.monotonic() < end:
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 65536)
            if keys and after.encode() in seen:
                os.write(terminal, keys)
                keys = b""
    os.close(terminal)
    return program.wait(LIMIT_S), seen.decode()


def test_live_output_is_redrawn_on_a_terminal(tmp_path: Path):
    code, seen = at_a_terminal("live_output.py", where=tmp_path)
    assert code == 0
    for shown in ("running  ", "one", "two", "25 %", "75 %", "\x1b[4F"):
        assert shown in seen
    last = re.sub(r"\x1b\[\d*[mK]", "", seen.rpartition("\x1b[4F")[2]).replace("\r\n", "\n")
    assert_as_promised("live_output.py", last)


def test_ctrl_c_ends_all_commands_of_live_output(tmp_path: Path):
    arguments = (
        "live_output.py",
        "echo begun; setsid sleep 600; :",
        "trap '' INT TERM; sleep 600",
    )
    code, seen = at_a_terminal(*arguments, where=tmp_path, keys=b"\x03", after="  begun")
    assert code == 130
    assert len(re.findall("ended  ", seen.rpartition("\x1b[2F")[2])) == 2


def test_ctrl_c_in_the_middle_of_many_sessions_leaves_nothing(tmp_path: Path):
    code, seen = at_a_terminal("fan_out.py", where=tmp_path, keys=b"\x03", after="5 of 50, ")
    assert "] 5 of 50, 0 failed" in seen, "progress is for terminals"
    assert "50 of 50" not in seen
    assert code not in {0, LEFTOVERS}


# Packages.


@contextlib.contextmanager
def serving(handler, address: str) -> Iterator[str]:
    with http.server.ThreadingHTTPServer((address, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield f"{address}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class _Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Log nothing."""


def test_packages_come_from_the_allowed_index_with_the_locked_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # The package that the example installs from the public index.
    monkeypatch.setattr(services, "PACKAGE", "six")
    services.make_index(tmp_path / "web")
    files = functools.partial(_Files, directory=str(tmp_path / "web"))
    # Inside, 127.0.0.1 is the sandbox's own; other loopback addresses can be allowed.
    with serving(files, "127.0.0.2") as index:
        arguments = ("locked_packages.py", "--index-url", f"http://{index}/simple")
        done = run(*arguments, "--allow", index, "six", where=tmp_path)
        refused = run(*arguments, "--allow", "index.test", "six", where=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert_as_promised("locked_packages.py", done.stdout)
    assert refused.returncode == 1
    assert "could not be locked" in refused.stderr


# The web app.


@contextlib.contextmanager
def begun(name: str, *arguments: str, where: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the block ends."""
    program = subprocess.Popen(
        watched(name, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=where,
    )
    with program:
        try:
            yield program
        finally:
            program.terminate()


class Browser:
    """A visitor: loads the page, keeps the cookie, runs commands."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.cookie = ""
        response, text = self._request("GET", "/")
        assert response.status == 200
        assert "http" not in text.replace(host, ""), "the page loads nothing from elsewhere"
        self.cookie = response.headers["Set-Cookie"].partition(";")[0]
        assert "HttpOnly" in response.headers["Set-Cookie"]
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]

    def _request(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection(self._host, timeout=LIMIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Cookie": self.cookie, **headers})
            response = connection.getresponse()
            return response, response.read().decode()

    def post(self, code: str, kind: str = "shell", **headers: str) -> tuple[int, str]:
        body = json.dumps({"code": code, "kind": kind})
        response, text = self._request("POST", "/run", body, **headers)
        return response.status, text

    def run(self, code: str, kind: str = "shell") -> tuple[str, dict]:
        """Return the output and the end event."""
        status, text = self.post(code, kind)
        assert status == 200, text
        events = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
        output = "".join(json.loads(data) for event, data in events if event == "output")
        assert events[-1][0] == "end"
        return output, json.loads(events[-1][1])


def test_visitors_of_the_web_app_have_their_own_files_and_limits(tmp_path: Path):
    with begun("web_app.py", "--port", "0", "--max-visitors", "2", where=tmp_path) as program:
        first = program.stdout.readline()
        host = first.strip().removeprefix("open http://").strip("/")
        ann, ben, third = Browser(host), Browser(host), Browser(host)
        well = {"code": 0, "reason": ""}

        assert ann.run("echo mine > ann.txt; ls") == ("ann.txt\n", well)
        assert ben.run("ls; echo his > ben.txt") == ("", well)
        assert ann.run("print(open('ann.txt').read())", "python") == ("mine\n\n", well)
        assert ann.run("ls") == ("ann.txt\n", well)

        assert ben.run("echo oh >&2; exit 3") == ("oh\n", {"code": 3, "reason": ""})
        output, end = ben.run("yes")
        assert (len(output) < 300_000, end["reason"]) == (True, "output")
        assert ann.run("printf '\\303'; sleep 0.2; printf '\\251'")[0] == "é"

        assert third.post("ls")[0] == 503
        assert ann.post("ls", **{"Sec-Fetch-Site": "same-site"})[0] == 403
        ann.cookie = "visitor=made.up"
        assert ann.post("ls")[0] == 403

        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate(timeout=LIMIT_S)
    assert (program.returncode, errors) == (0, "")
    assert_as_promised("web_app.py", first + rest)


def test_idle_sessions_and_abandoned_commands_end(tmp_path: Path):
    with begun("web_app.py", "--port", "0", "--idle", "0.4", where=tmp_path) as program:
        host = program.stdout.readline().strip().removeprefix("open http://").strip("/")
        ann = Browser(host)
        ann.run("touch kept")
        deadline = time.monotonic() + 10
        while ann.run("ls")[0] == "kept\n":
            assert time.monotonic() < deadline
            time.sleep(1)

        connection = http.client.HTTPConnection(host, timeout=LIMIT_S)
        body = json.dumps({"code": "echo begun; sleep 600", "kind": "shell"})
        connection.request("POST", "/run", body, {"Cookie": ann.cookie})
        response = connection.getresponse()
        assert b"begun" in response.fp.readline() + response.fp.readline() + response.fp.readline()
        assert ann.post("ls")[0] == 409
        response.close()
        connection.close()
        while ann.post("ls")[0] == 409:
            assert time.monotonic() < deadline + 10
            time.sleep(0.1)

        program.send_signal(signal.SIGTERM)
        assert program.wait(LIMIT_S) == 0

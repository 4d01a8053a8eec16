"""``sbx run``: streams, options and exit codes, as seen by the shell that called it."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.tool import SBX, begin, sbx
from tests.conftest import ISOLATED, WAYS, descendants, eventually

from union.sandbox._cli.main import main

pytestmark = pytest.mark.spec("H")


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The first arguments of every call, for each backend."""
    return ("run", "--backend", request.param)


JAILED = ("run", "--backend", ISOLATED[0])
Tool = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tool(capfd: pytest.CaptureFixture[str]) -> Tool:
    """The same in this process, which is quicker: its code, its stdout and its stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as exc:  # of the parser
            code = int(exc.code or 0)
        return code, *capfd.readouterr()

    return call


def test_streams_and_the_exit_code_pass_through(run: tuple[str, ...]) -> None:
    done = sbx(*run, "--", "sh", "-c", "echo out; echo err >&2; cat; exit 7", input="in\n")
    assert (done.returncode, done.stdout) == (7, "out\nin\n")
    assert done.stderr.splitlines()[-1] == "err"


@pytest.mark.parametrize(
    "words, out",
    [
        (("--", "echo", "--not", "-an", "--option"), "--not -an --option\n"),
        (("echo", "plain"), "plain\n"),
        (("-c", "echo $((6 * 7)) | cat"), "42\n"),
        (("--python", "if True:\n    print(6 * 7)"), "42\n"),
        (("--env", "A=1=2", "--env", "B", "-c", "echo $A $B"), "1=2 passed\n"),
        (("--cwd", "sub", "-c", "mkdir x; pwd | grep -o sub"), "sub\n"),
        (("--memory", "256Mi", "--cpus", "1", "-c", "echo fits"), "fits\n"),
    ],
    ids=["argv", "words", "shell", "python", "env", "cwd", "resources"],
)
def test_options_mirror_the_api(
    words: tuple[str, ...], out: str, tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.setenv("B", "passed")
    assert tool(*JAILED, "--work-dir", str(tmp_path), *words) == (0, out, "")


def test_python_comes_from_a_file_or_from_stdin(tmp_path: Path) -> None:
    source = "import sys\nprint('café', len(sys.stdin.read()))\n"
    (tmp_path / "script.py").write_text(source, encoding="utf-8")
    done = sbx(*JAILED, "--python", "script.py", cwd=tmp_path, input="12345")
    assert done.stdout == "café 5\n", done.stderr
    done = sbx(*JAILED, "--python", "-", input=source)
    assert done.stdout == "café 0\n", done.stderr


def test_input_of_every_kind_arrives_whole(tmp_path: Path) -> None:
    data = os.urandom(3 * 1024 * 1024)
    (tmp_path / "data").write_bytes(data)
    command = [*SBX, *JAILED, "--", "sha256sum"]
    wanted = hashlib.sha256(data).hexdigest().encode() + b"  -\n"
    piped = subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True, timeout=40)
    assert piped.stdout == wanted
    with (tmp_path / "data").open("rb") as file:
        read = subprocess.run(command, stdin=file, stdout=subprocess.PIPE, check=True, timeout=40)
    assert read.stdout == wanted


def test_output_comes_as_it_is_written_and_input_as_it_is_typed() -> None:
    script = "echo ready; read line; echo got $line; read line"
    process = begin(*JAILED, "-c", script, stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline() == "got hello\n"
    process.communicate(timeout=20)
    assert process.returncode == 1  # the exit code of read at end-of-file


def test_a_command_that_does_not_read_is_not_waited_for() -> None:
    process = begin(*JAILED, "--", "true", stdin=subprocess.PIPE)
    assert process.wait(timeout=20) == 0  # its stdin is still open
    process.communicate()


def test_without_a_work_dir_nothing_is_left_and_with_one_all_is(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = tool(*JAILED, "-c", "touch made; ls; pwd")
    name, place = out.split()
    assert name == "made"
    assert not Path(place).exists()
    monkeypatch.chdir(tmp_path)
    assert tool(*JAILED, "--work-dir", ".", "-c", "echo kept > made; pwd")[1] == f"{tmp_path}\n"
    assert (tmp_path / "made").read_text() == "kept\n"


def test_paths_are_shown_read_only_or_read_write(
    tool: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ro", "rw", "hidden", "work"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    monkeypatch.chdir(tmp_path)
    text = "cat ../ro/file ../rw/file ../hidden/file; touch ../ro/x ../rw/x"
    paths = ("--read-only", "ro", "--read-write", "rw", "--work-dir", "work")
    _, out, err = tool(*JAILED, *paths, "-c", text)
    assert out == "rorw", err
    assert not (tmp_path / "ro/x").exists()
    assert (tmp_path / "rw/x").exists()


def test_a_denied_connection_is_reported_with_the_option_that_allows_it(tool: Tool) -> None:
    source = "import socket; socket.create_connection(('other.test', 443), 5)"
    code, _, err = tool(*JAILED, "--allow", "allowed.test", "--python", source)
    assert code == 1
    assert "sbx: denied other.test" in err
    assert "--allow other.test" in err


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "give one command"),
        (("-c", "true", "--", "true"), "give one command"),
        (("--json", "--tty", "--", "true"), "--json and --tty exclude"),
        (
            ("--network", "open", "--allow", "a.test", "--", "true"),
            "--network allowlist, not --network open",
        ),
        (("--network", "allowlist", "--", "true"), "add --allow HOST"),
        (("--allow", "not a host", "--", "true"), "--allow"),
        (("--env", "SURELY_NOT_SET", "--", "true"), "--env SURELY_NOT_SET=VALUE"),
        (("--memory", "lots", "--", "true"), "512Mi"),
        (("--timeout", "-1", "--", "true"), "--timeout"),
        (("--work-dir", "/nothing/here", "--", "true"), "/nothing/here"),
        (("--python", "/", "--env", "=x"), "env"),
        (("ls", "-l"), "a command after --"),
        (("--backnd", "x"), "unknown arguments: --backnd"),
    ],
)
def test_a_usage_error_names_the_mistake(words: tuple[str, ...], message: str, tool: Tool) -> None:
    code, _, err = tool(*JAILED, *words)
    assert code == 2
    assert message in err


def test_exit_codes_of_commands_that_cannot_start(tool: Tool) -> None:
    code, out, err = tool(*JAILED, "--", "no-such-program")
    assert (code, out, err) == (127, "", "no-such-program: not found in the sandbox\n")
    code, out, err = tool(*JAILED, "--", "/etc/passwd")
    assert (code, out) == (126, "")
    assert err.startswith("/etc/passwd: cannot be executed")
    code, out, err = tool("run", "--backend", "sandbox-exec", "--", "true")
    assert (code, out) == (125, "")
    assert err.startswith("sbx: ")


def test_a_termination_reason_is_reported(tool: Tool) -> None:
    code, out, err = tool(*JAILED, "--timeout", "0.3", "-c", "echo begun; sleep 60")
    assert (code, out) == (128 + signal.SIGTERM, "begun\n")
    assert err == "sbx: ended by the sandbox: timeout\n"
    code, _, err = tool(*JAILED, "--memory", "64Mi", "--python", "x = bytearray(2**29)")
    assert code == 128 + signal.SIGKILL
    assert err == "sbx: ended by the sandbox: oom\n"


def test_the_result_as_json() -> None:
    done = sbx(*JAILED, "--json", "-c", "cat; echo é; echo err >&2; exit 3", input="in\n")
    found = json.loads(done.stdout)
    assert done.returncode == found["returncode"] == 3
    assert (found["stdout"], found["stderr"]) == ("in\né\n", "err\n")
    assert (found["termination_reason"], found["truncated"]) == ("", False)
    assert found["backend"] == JAILED[-1]
    assert found["runtime_ms"] > 0
    assert found["usage"]["max_rss_bytes"] > 0
    assert found["network"] == []


def test_an_error_as_json(tool: Tool) -> None:
    code, out, _ = tool(*JAILED, "--json", "--", "no-such-program")
    assert code == 127
    found = json.loads(out)
    assert found["returncode"] == 127
    assert found["stderr"].startswith("no-such-program: not found")
    code, out, _ = tool("run", "--backend", "sandbox-exec", "--json", "--", "true")
    assert code == 125
    assert json.loads(out)["error"]["code"] == "backend-unavailable"


ENDS = [(way, signal.SIGINT) for way in WAYS] + [
    (ISOLATED[0], signal.SIGTERM),
    (ISOLATED[0], signal.SIGHUP),
]


@pytest.mark.parametrize("way, number", ENDS)
def test_a_signal_ends_the_command_and_cleans_up(way: str, number: signal.Signals) -> None:
    # A shell that ignores the signal, with a child that left its session.
    script = f"trap '' {number.name[3:]}; setsid sleep 100 & pwd; while :; do sleep 1; done"
    process = begin("run", "--backend", way, "-c", script)
    assert process.stdout is not None
    place = Path(process.stdout.readline().strip())
    assert place.is_dir()
    below = descendants(process.pid)
    assert len(below) >= 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert not place.exists()
    assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below))


def test_a_command_may_end_by_itself_when_interrupted() -> None:
    script = "trap 'echo bye; exit 0' INT; echo ready; while :; do sleep 0.05; done"
    process = begin(*JAILED, "-c", script)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "bye\n")


def test_a_reader_that_leaves_ends_the_command() -> None:
    process = begin(*JAILED, "--", "yes")
    assert process.stdout is not None
    assert process.stdout.readline() == "y\n"
    process.stdout.close()
    assert process.wait(timeout=20) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_missing_standard_streams_are_not_taken_for_other_files() -> None:
    command = shlex.join((*SBX, *JAILED, "-c", "cat; exit 3"))
    done = subprocess.run(f"{command} <&- >&- 2>&-", shell=True, check=False, timeout=40)
    assert done.returncode == 3


def test_a_call_in_the_background_is_not_stopped_by_its_terminal(tmp_path: Path) -> None:
    """Reading the terminal from the background would stop it, so its input is at its end."""
    job = tmp_path / "job"
    job.write_text(f"set -m\n{shlex.join((*SBX, *JAILED, '-c', 'cat; echo end'))} &\nwait $!\n")
    done = subprocess.run(
        ["script", "-qec", f"sh {job}", "/dev/null"],
        check=False,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        timeout=40,
    )
    assert b"end" in done.stdout

"""``sbx``: help, version, doctor, serve and shell completion."""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import types
from typing import TYPE_CHECKING

import pytest

from union import sandbox as sb
from union.sandbox._backends import registry
from union.sandbox._cli import parser
from union.sandbox._cli.main import main
from union.sandbox._version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = pytest.mark.spec("H")
COMMANDS = (
    *("run", "shell", "repl", "mcp", "cp", "checkpoint", "rollback", "diff", "fork"),
    *("doctor", "serve", "version", "completion"),
)


def called(*words: str) -> int:
    """Return the exit code, also if the parser exits."""
    try:
        return main(words)
    except SystemExit as exc:
        return int(exc.code or 0)


def test_it_is_a_console_script() -> None:
    scripts = importlib.metadata.distribution("unionai-sandbox").entry_points
    found = {script.name: script.value for script in scripts if script.group == "console_scripts"}
    assert found["sbx"] == "union.sandbox._cli.main:main"


@pytest.mark.parametrize("words", [(), *((name,) for name in COMMANDS if name != "serve")])
def test_help_has_usage_and_examples(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(*words, "--help") == 0
    text = capsys.readouterr().out
    assert f"usage: {' '.join(('sbx', *words))} " in text
    if words in {(), ("run",), ("shell",), ("cp",)}:
        assert "examples:" in text
    if not words:
        assert re.findall(r"^    (\w+)  ", text, re.MULTILINE) == list(COMMANDS)


def test_help_is_quick() -> None:
    """Nothing that runs sandboxes is imported to explain them."""
    code = """
import sys
from union.sandbox._cli.main import main
try:
    main(["run", "--help"])
except SystemExit:
    pass
heavy = {"asyncio", "socket", "ctypes", "union.sandbox.on_device"} & set(sys.modules)
sys.exit(f"imported: {heavy}" if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], check=False, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr


def test_every_example_of_the_help_is_a_call_that_parses() -> None:
    made = parser.make_parser()
    texts = parser._TOP + parser._RUN + parser._SHELL + parser._CP
    lines = [line.strip() for line in texts.splitlines() if line.startswith("  ")]
    # Without what goes in front, what the command itself gets, and the remark behind.
    examples = [re.split(r" {3,}| -- ", line.partition("sbx ")[2])[0] for line in lines]
    assert len(examples) > 12
    for example in examples:
        assert made.parse_args(shlex.split(example)).handler, example


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "examples:" in capsys.readouterr().out


def test_the_backends_are_those_of_the_api() -> None:
    assert parser.BACKENDS == registry.NAMES


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert called("--version") == 0
    assert capsys.readouterr().out == f"sbx {__version__}\n"
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith(f"sbx {__version__}\npython 3.")
    assert main(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sbx"] == __version__


@pytest.mark.parametrize("ok, code", [(True, 0), (False, 1)])
def test_doctor_shows_the_report_and_its_verdict(
    ok: bool,  # noqa: FBT001 - a parameter of the test
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Report:
        def __str__(self) -> str:
            return "the report"

        def to_dict(self) -> dict[str, object]:
            return {"ok": self.ok}

    Report.ok = ok  # type: ignore[attr-defined]
    monkeypatch.setattr(sb, "doctor", Report)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out == "the report\n"
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {"ok": ok}


def test_doctor_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["ok"] else 1)
    assert [backend["name"] for backend in report["backends"]] == list(registry.NAMES)


def test_serve_hands_every_argument_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    server = types.ModuleType("union.sandbox.server")
    server.main = lambda: seen.append(sys.argv[1:]) or 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "union.sandbox.server", server)
    monkeypatch.setattr(sys, "argv", ["sbx"])
    assert main(["serve", "--bind", "127.0.0.1:0", "--help"]) == 3
    assert seen == [["--bind", "127.0.0.1:0", "--help"]]


@pytest.mark.spec("A2")
def test_serve_without_its_extra_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Absent:
        """Finds no server: what an installation without the extra looks like."""

        def find_spec(self, name: str, *_: object) -> None:
            if name in {"aiohttp", "union.sandbox.server"}:
                raise ModuleNotFoundError(f"No module named {name!r}", name="aiohttp")

    for name in [n for n in sys.modules if n.partition(".")[0] == "aiohttp" or ".server" in n]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    assert main(["serve"]) == 125
    err = capsys.readouterr().err
    assert "aiohttp" in err
    assert "hint: in a checkout: pip install '.[remote]'" in err


# Completion.


def script(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    assert main(["completion", shell]) == 0
    path = tmp_path / f"sbx.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def lines_of(*command: str, cwd: Path | None = None) -> set[str]:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30, cwd=cwd)
    assert done.stderr == ""
    return set(done.stdout.split("\n")) - {""}


@pytest.mark.parametrize(
    "words, wanted",
    [
        (["sbx", ""], {*COMMANDS}),
        (["sbx", "--"], {"--help", "--version"}),
        (["sbx", "ru"], {"run"}),
        (["sbx", "run", "--allow"], {"--allow", "--allow-pypi"}),
        (["sbx", "run", "--network", ""], {"blocked", "allowlist", "open"}),
        (["sbx", "shell", "--backend", "user"], {"userns"}),
        (["sbx", "completion", "z"], {"zsh"}),
        (["sbx", "run", "--timeout", ""], set()),
        (["sbx", "run", "--work-dir", ""], set()),  # it has no directory to offer
        (["sbx", "run", "--", "s"], {"sbx.bash"}),
        (["sbx", "run", "--", "--allow"], {"sbx.bash"}),  # no option of sbx: only files
    ],
)
def test_bash_completes(
    words: list[str], wanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("bash", tmp_path, capsys)
    line = " ".join(f"'{word}'" for word in words)
    call = f"source {path}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _shtab_sbx"
    show = 'printf "%s\\n" "${COMPREPLY[@]}"'
    assert lines_of("bash", "--norc", "-c", f"{call}; {show}", cwd=tmp_path) == wanted


@pytest.mark.parametrize(
    "line, wanted",
    [
        ("sbx ru", {"run"}),
        ("sbx run --network ", {"blocked", "allowlist", "open"}),
        ("sbx run --allow", {"--allow", "--allow-pypi"}),
        ("sbx completion z", {"zsh"}),
    ],
)
def test_fish_completes(
    line: str, wanted: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script("fish", tmp_path, capsys)
    found = lines_of("fish", "--no-config", "-c", f"source {path}; complete -C '{line}'")
    assert {text.partition("\t")[0] for text in found} == wanted


def test_zsh_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a terminal of its own, because zsh completes nowhere else."""
    script("zsh", tmp_path, capsys).rename(tmp_path / "_sbx")
    drive = f"""
zmodload zsh/zpty
zpty z 'zsh -f'
zpty -w z 'PS1=; fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D'
zpty -w z 'bindkey "^I" complete-word'
zpty -w z 'echo be""gun'
zpty -r z shown '*begun*'
zpty -w -n z $'sbx run --netw\\t\\t'
zpty -r z shown '*open*'
print -r -- "$shown"
zpty -d z
"""
    done = subprocess.run(
        ["zsh", "-f", "-c", drive], check=True, capture_output=True, text=True, timeout=30
    )
    assert "--network" in done.stdout
    assert "blocked" in done.stdout

"""A command of plain words runs in /bin/sh; everything else in the shell of the session."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from union.sandbox.on_device import _pip_front, _shell

PLAIN = [
    "true",
    "ls -l",
    "python3 -m pytest -q tests/a.py",
    "make CC=gcc -j4",
    "./run a.b:c",
    "pwd",
]
NOT_PLAIN = [
    "source x", "echo -e a", "echo a", "a; b", "a | b", "a && b", "a > b", "a $b", "a *", "a 'b'",
    "A=1 b", "a\nb", "a  b", " a", "[[ a ]]", "declare x", "time ls", "a {1,2}", "a ~/b", "a !b",
    "type ls", ". x", "ls # b", "a\tb", "-x", "é", "for", "a \\b", "a ?", "a (b)",
]  # fmt: skip


@pytest.mark.spec("C12")
def test_only_words_without_syntax_are_plain():
    assert [text for text in PLAIN if not _shell.means_the_same(text)] == []
    assert [text for text in NOT_PLAIN if _shell.means_the_same(text)] == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_every_builtin_of_bash_that_differs_is_listed():
    listed = subprocess.run(
        ["bash", "-c", "compgen -b; compgen -k"], check=True, capture_output=True, text=True
    ).stdout.split()
    same = {name for name in listed if _shell.means_the_same(name)}
    assert same == {"cd", "exit", "false", "pwd", "true"}


@pytest.mark.spec("C12")
def test_a_missing_bash_is_an_error_only_if_it_is_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_shell, "_BASH", ("/nonexistent/bash",))
    assert _shell.find_shell(None) == _shell.find_shell("sh") == "/bin/sh"
    with pytest.raises(_shell.SandboxUsageError, match="/nonexistent/bash"):
        _shell.find_shell("bash")


@pytest.mark.parametrize(
    "given, made",
    [
        ("install x", "install x"),
        ("-q install --user x", "install -q x"),
        ("--disable-pip-version-check install x", "install x"),
        ("install --progress-bar off x", "install x"),
        ("install --progress-bar=off x", "install x"),
        ("uninstall -y x", "uninstall x"),
        ("--version", " --version"),
    ],
)
def test_arguments_of_pip_become_those_of_uv(given: str, made: str):
    assert " ".join(_pip_front.translated(given.split())) == made

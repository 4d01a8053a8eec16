"""The commands that pages show as indented blocks exist, with these options, files and extras.

Blocks in fences are executed by the other tests of this directory. These need a network, root, a
terminal or another program, so their words are checked: each line must be of a kind that is known
here, and the reason why it is not executed is listed with its kind.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from typing import TYPE_CHECKING

import pytest
from tests.docs.blocks import PAGES, ROOT

from union.sandbox._cli.main import _split
from union.sandbox._cli.parser import make_parser
from union.sandbox.server._config import _parser as server_parser

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
NOTE = re.compile(r"^!!! .*?(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"(?:\A|(?<=\n\n))((?: {4}[^\n]*\n)+)")
GENERATED = {"docs/reference/cli.md", "docs/reference/api.md", "docs/reference/wire.md"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def lines_in(text: str) -> list[str]:
    """Return the commands of indented blocks, with continued lines joined and remarks removed."""
    found = []
    for block in BLOCK.findall(NOTE.sub("", FENCED.sub("", text))):
        joined = re.sub(r" *\\\n\s*", " ", block)
        found += [line.strip() for line in joined.splitlines() if line.strip()]
    return found


def check_sbx(words: list[str]) -> None:
    """Parse it; ``sbx COMMAND   description`` of an overview is cut at the description."""
    own, command = _split(words[1:])
    if own[:1] == ["serve"]:
        return
    options = make_parser().parse_args(own)
    assert options.handler is not None
    assert own[:1] != ["run"] or command or options.command or options.shell or options.python


def check_server(words: list[str]) -> None:
    server_parser().parse_args(words[1:])


def check_pip(words: list[str]) -> None:
    for word in words[2:]:
        if match := re.fullmatch(r"\.\[([\w,-]+)\]", word):
            assert set(match[1].split(",")) <= set(PROJECT["optional-dependencies"]), word
        else:
            assert word in {".", "-e", "--editable"} or word.endswith(".whl"), word


def check_make(words: list[str]) -> None:
    assert words[1] in TARGETS, words


def check_files(words: list[str]) -> None:
    """Files of this tree that the command names must exist."""
    named = [word for word in words if word.startswith(("deploy/", "docs/", "examples/"))]
    assert [name for name in named if not (ROOT / name).exists()] == []


# The first word of a line -> its check, and why the tests do not execute it.
KINDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "sbx": (check_sbx, "tests/cli executes each command with its options"),
    "sandbox-server": (check_server, "it runs until it is stopped; test_remote_page starts one"),
    "pip": (check_pip, "downloads packages; tests/packaging installs a wheel offline"),
    "make": (check_make, "each target has a test, or is this test run"),
    "python3": (check_files, "makes a virtualenv for pip, which downloads"),
    "python": (check_files, "modules of this tree; test_console runs the profile's"),
    "docker": (check_files, "needs a container engine and a registry"),
    "sudo": (check_files, "changes the system"),
    "openssl": (check_files, "changes the system"),
    "claude": (check_files, "a program of others"),
    "curl": (check_files, "needs a server; tests/remote has these requests"),
    "unionai-sandbox-deploy": (check_files, "needs a cluster; tests/cluster runs it"),
}
# Lines that are no commands: files and code. Each begins with one of these.
NO_COMMAND = {
    "FROM ": "a container file",
    "RUN ": "a container file",
    "COPY ": "a container file",
    "USER ": "a container file",
    "http://": "an address",
    "location": "settings of a web server",
    "proxy_": "settings of a web server",
    "client_": "settings of a web server",
    "}": "settings of a web server",
    "await ": "Python that needs a network, a cluster or a GPU",
    "async ": "Python that needs a network, a cluster or a GPU",
    "network_allowlist=": "Python that needs a network",
    "box.exec(": "Python that needs a network",
    "cell = ": "Python that needs matplotlib; tests/contract draws a figure",
    "Path(": "Python that needs matplotlib; tests/contract draws a figure",
    "print(": "Python that needs a network, a cluster or a GPU",
    "env = sb.SandboxEnvironment(": "Python that needs a cluster",
    'name="agents"': "Python that needs a cluster",
    "secrets=[flyte.": "Python that needs a cluster",
    "credentials={": "Python that needs a cluster",
    ")": "Python that needs a cluster",
    "api = sb.Http(": "Python that needs a cluster",
    "~/": "the program of another virtualenv",
    "--": "options of the line above",
    "-e ": "options of the line above",
}


def shown_in(page: Path) -> list[str]:
    return [
        line
        for line in lines_in(page.read_text(encoding="utf-8"))
        if not any(line.startswith(start) for start in NO_COMMAND)
    ]


SHOWN = {
    name: found
    for page in PAGES
    if (name := page.relative_to(ROOT).as_posix()) not in GENERATED
    and "decisions" not in name
    and page.name not in {"CHANGELOG.md", "ARCHITECTURE.md"}
    and (found := shown_in(page))
}


def test_blocks_are_found_and_lines_are_joined():
    text = "a\n\n    one \\\n        two\n    three   # remark\n\nb\n\n```sh\n    no\n```\n"
    assert lines_in(text) == ["one two", "three   # remark"]
    assert {"README.md", "docs/guides/sbx.md", "docs/guides/systemd.md"} <= set(SHOWN)


@pytest.mark.spec("H")
@pytest.mark.parametrize("page", SHOWN)
def test_every_command_of_a_page_is_valid(page: str):
    for line in SHOWN[page]:
        for part in re.split(r" && | \| ", line):
            # Two spaces or more separate a command of an overview from its description.
            # "[options]" and "a|b" are of an overview, too.
            command = re.sub(r"\[options\] ?|(?<=\w)\|[\w|]+", "", re.sub(r" {2,}.*", "", part))
            words = shlex.split(command, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                del words[0]  # a variable for this command
            if not words or words[0] in {".", "cd", "printf", "exec"}:
                continue
            assert words[0] in KINDS, f"{page}: {line}: no kind of command is known for this"
            KINDS[words[0]][0](words)


@pytest.mark.parametrize(
    "line", ["sbx run --no-such-option -- ls", "make no-such-target", "pip install '.[no-extra]'"]
)
def test_a_wrong_command_is_found(line: str):
    words = shlex.split(line)
    with pytest.raises((AssertionError, SystemExit)):
        KINDS[words[0]][0](words)

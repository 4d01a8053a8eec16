"""The launcher's source under four readers that look for different mistakes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"
SOURCES = sorted(
    # The headers of macOS are not here.
    str(path)
    for path in NATIVE.rglob("*.c")
    if path.name != "os_macos.c"
)
LANGUAGE = ("-std=c11", "-D_GNU_SOURCE")
# The analyzer of clang takes most of the time. That of gcc, which always runs, follows calls too.
TIDY = () if os.environ.get("EVERYWHERE") == "1" else ("--checks=-clang-analyzer-*",)
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wshadow", "-Wconversion", "-Wvla", "-Wundef")
CPPCHECK = ("--enable=warning,style,performance,portability", "--inline-suppr", "--quiet")


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name}: apt-get install {name}")
    return found


def findings(*command: str) -> str:
    """What a tool has to say, if it found anything; nothing else may come out of it."""
    done = subprocess.run(
        command,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=NATIVE.parent,
        env=dict(os.environ, LC_ALL="C"),
    )
    return "" if done.returncode == 0 else done.stdout or f"it exited with {done.returncode}"


@pytest.mark.parametrize("source", SOURCES, ids=os.path.basename)
def test_clang_tidy_finds_nothing(source: str):
    assert findings(tool("clang-tidy"), "--quiet", *TIDY, source, "--", *LANGUAGE) == ""


def test_cppcheck_finds_nothing():
    options = (*CPPCHECK, "--std=c11", "-D_GNU_SOURCE", "--error-exitcode=1")
    assert findings(tool("cppcheck"), *options, str(NATIVE)) == ""


def test_the_analyzer_of_gcc_finds_nothing(tmp_path: Path):
    gcc, out = tool("gcc"), str(tmp_path / "o")
    for source in SOURCES:
        assert (
            findings(gcc, *LANGUAGE, *WARNINGS, "-O2", "-fanalyzer", "-c", source, "-o", out) == ""
        )


def test_clang_warns_of_nothing(tmp_path: Path):
    clang, out = tool("clang"), str(tmp_path / "o")
    # The first argument of setrlimit is an enum to one libc and an int to another.
    options = (*LANGUAGE, *WARNINGS, "-Wno-sign-conversion", "-O2")
    for source in SOURCES:
        assert findings(clang, *options, "-c", source, "-o", out) == ""


def test_the_tools_are_awake(tmp_path: Path):
    """What each is there for is found in a file that has it."""
    bad = tmp_path / "bad.c"
    bad.write_text(
        "#include <stdlib.h>\n"
        "int f(int n);\n"
        "int g(void);\n"
        "int f(int n)\n"
        "{\n"
        "    int *p = malloc(sizeof(int) * 4);\n"
        "    if (!p)\n"
        "        return 0;\n"
        "    p[0] = n;\n"
        "    free(p);\n"
        "    return p[0];\n"
        "}\n"
        "int g(void) { int a[4] = {0}; return a[4]; }\n"
        "unsigned long h(int n);\n"
        "unsigned long h(int n) { return sizeof(sizeof(n)); }\n"
    )
    config = ("--quiet", f"--config-file={NATIVE / '.clang-tidy'}")
    found = findings(tool("clang-tidy"), *config, *TIDY, str(bad), "--", *LANGUAGE)
    assert "sizeof(sizeof" in found
    assert "released" in findings(tool("clang-tidy"), *config, str(bad), "--", *LANGUAGE)
    assert "out of bounds" in findings(tool("cppcheck"), *CPPCHECK, "--error-exitcode=1", str(bad))
    analyzer = ("-Werror", "-fanalyzer", "-c", str(bad), "-o", str(tmp_path / "o"))
    assert "use-after-free" in findings(tool("gcc"), *LANGUAGE, *analyzer)

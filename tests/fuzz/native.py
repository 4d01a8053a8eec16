"""Builds the native targets, with libFuzzer where there is clang, else with a driver of our own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
BUILT: Final = ROOT / ".cache" / "fuzz" / "bin"
TARGETS: Final = Path(__file__).parent / "native"
FLAGS: Final = (
    "-std=c11",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-g",
    "-O1",
    "-fno-sanitize-recover=all",
)
# The files that can be run without any effect on the machine.
PURE: Final = ("plan.c", "request.c", "netlink.c", "message.c", "mediated.c")
PREFIX: Final = "native_"
NAMES: Final = (
    "native_plan",
    "native_exec_request",
    "native_message",
    "native_netlink",
    "native_mediated",
)
REMEDY: Final = "apt-get install clang libclang-rt-dev"


def build(name: str, *, libfuzzer: bool) -> Path | None:
    """Returns the program, made anew if a source has changed; None if there is no compiler."""
    compiler = shutil.which("clang") if libfuzzer else shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    own = TARGETS / f"{name.removeprefix(PREFIX)}.c"
    sources = [own, *(ROOT / "native" / pure for pure in PURE)]
    sanitize = "-fsanitize=address,undefined"
    if libfuzzer:
        sanitize += ",fuzzer"
    else:
        sources.append(TARGETS / "standalone.c")
    program = BUILT / (name if libfuzzer else f"{name}-standalone")
    headers = (TARGETS / "fuzz.h", ROOT / "native" / "sbx.h")
    newest = max(file.stat().st_mtime for file in (*sources, *headers))
    if program.exists() and program.stat().st_mtime > newest:
        return program
    BUILT.mkdir(parents=True, exist_ok=True)
    # Tests that run beside each other may build the same one: the last to be ready stays.
    fresh = program.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, sanitize, *map(str, sources), "-o", str(fresh)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode and libfuzzer and "libclang_rt" in done.stderr:
        return None  # clang without its runtime
    if done.returncode:
        raise RuntimeError(done.stderr)
    return fresh.replace(program)

"""Checks of release files."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import struct
import tarfile
import zipfile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

MACHINES = {"x86_64": 62, "aarch64": 183}
"""ELF machine numbers."""
LAUNCHER = "union/sandbox/_linux/bin/sandbox-launcher"
LIBRARY = "union/sandbox/_linux/bin/sandbox-template.so"
MAC_MACHINES = {"macos-arm64": 0x0100000C, "macos-x86_64": 0x01000007}
"""Mach-O machine numbers."""
MAC_LAUNCHER = "union/sandbox/_macos/bin/sandbox-launcher"
MAC_VERSION = (13, 0)
MANUAL = "share/man/man1/sbx.1"
_MACH_O = 0xFEEDFACF
_LOAD_LIBRARY, _SIGNATURE, _BUILD_VERSION = 0xC, 0x1D, 0x32
_SYSTEM_LIBRARY = "/usr/lib/libSystem.B.dylib"
_INTERPRETER = 3
_EXECUTABLE = 0o755
_ALL_MACHINES = MACHINES | MAC_MACHINES


class DistError(Exception):
    """A file is not fit for release; the message has the reason."""


def elf_machine(content: bytes) -> int:
    """Return the architecture of a static 64-bit program; raise for anything else."""
    if content[:7] != b"\x7fELF\x02\x01\x01":
        raise DistError("the launcher is no 64-bit little-endian ELF program")
    (machine,) = struct.unpack_from("<H", content, 18)
    (table,) = struct.unpack_from("<Q", content, 32)
    size, count = struct.unpack_from("<HH", content, 54)
    kinds = {struct.unpack_from("<I", content, table + size * n)[0] for n in range(count)}
    if _INTERPRETER in kinds:
        raise DistError("the launcher needs a loader, so it is not static")
    return int(machine)


def mach_o_machine(content: bytes) -> int:
    """Return the architecture of a program for macOS; raise for one that could not start there."""
    if len(content) < 32 or struct.unpack_from("<I", content)[0] != _MACH_O:
        raise DistError("the launcher is no 64-bit Mach-O program")
    machine, _, _, count = struct.unpack_from("<4I", content, 4)
    at, libraries, version, signed = 32, [], (0, 0), False
    for _ in range(count):
        kind, length = struct.unpack_from("<2I", content, at)
        if kind == _LOAD_LIBRARY:
            start = at + struct.unpack_from("<I", content, at + 8)[0]
            libraries.append(content[start : at + length].split(b"\0")[0].decode())
        elif kind == _BUILD_VERSION:
            oldest = struct.unpack_from("<I", content, at + 12)[0]
            version = (oldest >> 16, oldest >> 8 & 0xFF)
        elif kind == _SIGNATURE:
            signed = True
        at += length
    if libraries != [_SYSTEM_LIBRARY]:
        raise DistError(f"the launcher needs {libraries}, not {_SYSTEM_LIBRARY} alone")
    if version != MAC_VERSION:
        raise DistError(f"the launcher needs macOS {version}, its tag says {MAC_VERSION}")
    if machine == MAC_MACHINES["macos-arm64"] and not signed:
        raise DistError("the launcher is not signed, so Apple's processors do not execute it")
    return int(machine)


def check_wheel(wheel: Path, *, architecture: str, source: Path) -> None:
    """Raise unless the wheel contains exactly the expected files."""
    with zipfile.ZipFile(wheel) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        contents = {name: archive.read(name) for name in entries}
    name, version, *_ = wheel.name.split("-")
    info = f"{name}-{version}.dist-info"
    _check_tags(wheel, contents[f"{info}/WHEEL"].decode(), architecture)
    _check_record(contents, f"{info}/RECORD")
    data = f"{name}-{version}.data/data"
    if f"{data}/{MANUAL}" not in entries:
        raise DistError(f"{wheel.name}: no manual page")
    shipped = {n for n in entries if not n.startswith((f"{info}/", f"{data}/"))}
    shipped -= {LAUNCHER, LIBRARY, MAC_LAUNCHER}
    compiled = {os.path.basename(one) for one in (LAUNCHER, LIBRARY)}
    wanted = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name not in compiled
    }
    if shipped != wanted:
        raise DistError(f"{wheel.name}: differs from src in {sorted(shipped ^ wanted)}")
    if "union/__init__.py" in shipped or "union/sandbox/py.typed" not in shipped:
        raise DistError(f"{wheel.name}: not a typed package in a shared namespace")
    if f"{info}/licenses/LICENSE" not in entries:
        raise DistError(f"{wheel.name}: no licence")
    if (LIBRARY in entries) != (architecture in MACHINES):
        raise DistError(f"{wheel.name}: {LIBRARY} belongs into the wheels for Linux")
    launchers = {LAUNCHER, MAC_LAUNCHER} & set(entries)
    wanted_launcher = MAC_LAUNCHER if architecture in MAC_MACHINES else LAUNCHER
    if architecture not in _ALL_MACHINES:
        if launchers:
            raise DistError(f"{wheel.name}: a pure wheel with a program for one machine")
        return
    if launchers != {wanted_launcher}:
        raise DistError(f"{wheel.name}: its launchers are {sorted(launchers)}")
    if entries[wanted_launcher].external_attr >> 16 & 0o777 != _EXECUTABLE:
        raise DistError(f"{wheel.name}: the launcher is not executable")
    machine_of = mach_o_machine if architecture in MAC_MACHINES else elf_machine
    if machine_of(contents[wanted_launcher]) != _ALL_MACHINES[architecture]:
        raise DistError(f"{wheel.name}: the launcher is for another architecture")


def _check_tags(wheel: Path, metadata: str, architecture: str) -> None:
    tags = re.findall(r"^Tag: (.+)$", metadata, re.MULTILINE)
    pure = re.findall(r"^Root-Is-Purelib: (.+)$", metadata, re.MULTILINE) == ["true"]
    python, abi, platforms = wheel.stem.split("-")[2:]
    if sorted(tags) != sorted(f"{python}-{abi}-{one}" for one in platforms.split(".")):
        raise DistError(f"{wheel.name}: its name and its tags differ: {tags}")
    if (python, abi) != ("py3", "none") or pure != (architecture not in _ALL_MACHINES):
        raise DistError(f"{wheel.name}: meant for other Pythons than it fits")
    suffix = architecture.removeprefix("macos-")
    begin = f"macosx_{MAC_VERSION[0]}_{MAC_VERSION[1]}_" if architecture in MAC_MACHINES else ""
    if not all(o.endswith(suffix) and o.startswith(begin) for o in platforms.split(".")):
        raise DistError(f"{wheel.name}: not a wheel for {architecture}")


def _check_record(contents: dict[str, bytes], record: str) -> None:
    recorded = {row[0]: row[1] for row in csv.reader(io.StringIO(contents[record].decode()))}
    for name, content in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if recorded.pop(name, None) not in {f"sha256={digest}", "" if name == record else None}:
            raise DistError(f"{name} does not match RECORD")
    if recorded:
        raise DistError(f"RECORD lists missing files: {sorted(recorded)}")


def check_sdist(sdist: Path) -> None:
    """Raise unless the source distribution has all files for building, testing and reading."""
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers()}
    needed = ("LICENSE", "README.md", "hatch_build.py", "native/main.c", "tests/conftest.py")
    if missing := [name for name in needed if name not in names]:
        raise DistError(f"{sdist.name}: without {missing}")
    built = (
        "site/",
        "dist/",
        "build/",
        ".cache/",
        ".venv/",
        f"src/{LAUNCHER}",
        f"src/{MAC_LAUNCHER}",
    )
    if extra := [name for name in sorted(names) if name.startswith(built)]:
        raise DistError(f"{sdist.name}: with {extra[:5]}")

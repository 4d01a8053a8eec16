"""Checks of release files."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
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
_INTERPRETER = 3
_EXECUTABLE = 0o755


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


def check_wheel(wheel: Path, *, architecture: str, source: Path) -> None:
    """Raise unless the wheel contains exactly the expected files."""
    with zipfile.ZipFile(wheel) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        contents = {name: archive.read(name) for name in entries}
    name, version, *_ = wheel.name.split("-")
    info = f"{name}-{version}.dist-info"
    _check_tags(wheel, contents[f"{info}/WHEEL"].decode(), architecture)
    _check_record(contents, f"{info}/RECORD")
    shipped = {n for n in entries if not n.startswith(f"{info}/")} - {LAUNCHER}
    wanted = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != "sandbox-launcher"
    }
    if shipped != wanted:
        raise DistError(f"{wheel.name}: differs from src in {sorted(shipped ^ wanted)}")
    if "union/__init__.py" in shipped or "union/sandbox/py.typed" not in shipped:
        raise DistError(f"{wheel.name}: not a typed package in a shared namespace")
    if f"{info}/licenses/LICENSE" not in entries:
        raise DistError(f"{wheel.name}: no licence")
    if architecture not in MACHINES:
        if LAUNCHER in entries:
            raise DistError(f"{wheel.name}: a pure wheel with a program for one machine")
        return
    if entries[LAUNCHER].external_attr >> 16 & 0o777 != _EXECUTABLE:
        raise DistError(f"{wheel.name}: the launcher is not executable")
    if elf_machine(contents[LAUNCHER]) != MACHINES[architecture]:
        raise DistError(f"{wheel.name}: the launcher is for another architecture")


def _check_tags(wheel: Path, metadata: str, architecture: str) -> None:
    tags = re.findall(r"^Tag: (.+)$", metadata, re.MULTILINE)
    pure = re.findall(r"^Root-Is-Purelib: (.+)$", metadata, re.MULTILINE) == ["true"]
    python, abi, platforms = wheel.stem.split("-")[2:]
    if sorted(tags) != sorted(f"{python}-{abi}-{one}" for one in platforms.split(".")):
        raise DistError(f"{wheel.name}: its name and its tags differ: {tags}")
    if (python, abi) != ("py3", "none") or pure != (architecture not in MACHINES):
        raise DistError(f"{wheel.name}: meant for other Pythons than it fits")
    if not all(one.endswith(architecture) for one in platforms.split(".")):
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
    built = ("site/", "dist/", "build/", ".cache/", ".venv/", f"src/{LAUNCHER}")
    if extra := [name for name in sorted(names) if name.startswith(built)]:
        raise DistError(f"{sdist.name}: with {extra[:5]}")

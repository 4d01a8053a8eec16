"""A wheel of exactly the code that this process runs, made without a compiler and without an index.

An image needs this package, and no index has the code of a checkout, of an editable install or of a
wheel that was built by hand. The wheel is therefore made again from the files that are imported
here: from those that the installed distribution records, or from the source tree.

Its version ends in a digest of its content (``0.1.0+code3f2a...``). Indexes accept no such version,
so an installer that is asked for it can find it in this wheel only. The wheel is stored without
compression: the same code gives the same bytes on every machine, and with them the same image.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import tomllib
import weakref
import zipfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import union.sandbox
from union.sandbox.errors import SandboxExecutionError

__all__ = [
    "DISTRIBUTION",
    "PLATFORMS",
    "Source",
    "Wheel",
    "current_wheel",
    "find_source",
    "write_wheel",
]

DISTRIBUTION: Final = "unionai-sandbox"
_FILE_NAME: Final = "unionai_sandbox"
_PACKAGE: Final = "union/sandbox"
_LAUNCHER: Final = f"{_PACKAGE}/_linux/bin/sandbox-launcher"
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""The oldest time that an archive can hold."""
_DIGITS: Final = 12
_MACHINES: Final = {62: "x86_64", 183: "aarch64"}
"""The field ``e_machine`` of an ELF file."""
PLATFORMS: Final = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of this package as they are imported here, and the description of the package."""

    kind: Literal["installed", "editable", "checkout"]
    root: Path
    """The directory with the package ``union`` in it."""
    files: tuple[str, ...]
    """Relative to ``root``, sorted."""
    version: str
    """Without the digest of an earlier wheel."""
    requires_python: str
    requirements: tuple[str, ...]
    """With their markers, sorted."""
    scripts: tuple[str, ...]
    """The console scripts, as ``name = module:function``, sorted."""
    license_text: str = field(default="", repr=False)

    @property
    def machine(self) -> str | None:
        """The architecture of the launcher; None without a launcher for Linux."""
        try:
            with open(self.root / _LAUNCHER, "rb") as file:
                header = file.read(20)
        except FileNotFoundError:
            return None
        if header[:4] != b"\x7fELF":
            return None
        return _MACHINES.get(int.from_bytes(header[18:20], "little"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that was made from the code of this process."""

    path: Path
    source: Source
    version: str
    sha256: str
    names: tuple[str, ...] = field(repr=False)
    """The names of its files."""


@functools.cache
def find_source() -> Source:
    """Find the files that this process imports, and describe them."""
    # The package itself is a file of the tree; `union` is a namespace and has no file.
    package = Path(union.sandbox.__file__).resolve().parent
    root = package.parent.parent
    try:
        installed = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        installed = None
    if installed is not None and _is_installed_at(installed, package):
        return _from_record(installed, root)
    kind: Literal["editable", "checkout"] = "checkout"
    if installed is not None and _editable_root(installed) in {root, root.parent}:
        kind = "editable"
    return _from_tree(root, kind)


def _is_installed_at(installed: metadata.Distribution, package: Path) -> bool:
    """Whether the installed distribution records the package that is imported."""
    first = f"{_PACKAGE}/__init__.py"
    if not any(str(file) == first for file in installed.files or ()):
        return False
    return Path(str(installed.locate_file(first))).resolve().parent == package


def _editable_root(installed: metadata.Distribution) -> Path | None:
    """Return the directory of an editable install."""
    from urllib.parse import unquote, urlsplit

    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    url = urlsplit(str(origin.get("url", "")))
    is_editable = bool(origin.get("dir_info", {}).get("editable"))
    return Path(unquote(url.path)).resolve() if is_editable and url.scheme == "file" else None


def _from_record(installed: metadata.Distribution, root: Path) -> Source:
    files = sorted(
        str(file)
        for file in installed.files or ()
        if str(file).startswith(f"{_PACKAGE}/") and not str(file).endswith(".pyc")
    )
    missing = [name for name in files if not (root / name).is_file()]
    if missing:
        raise SandboxExecutionError(
            f"the installation in {root} is not complete: {', '.join(missing[:5])} of its RECORD "
            f"{'is' if len(missing) == 1 else 'are'} missing",
            code="image-source",
            hint="install the package again",
        )
    about = installed.metadata
    return Source(
        kind="installed",
        root=root,
        files=tuple(files),
        version=installed.version.partition("+")[0],
        requires_python=about["Requires-Python"] or "",
        requirements=tuple(sorted(installed.requires or ())),
        scripts=tuple(
            sorted(
                f"{point.name} = {point.value}"
                for point in installed.entry_points
                if point.group == "console_scripts"
            )
        ),
        license_text=installed.read_text("licenses/LICENSE") or "",
    )


def _from_tree(root: Path, kind: Literal["editable", "checkout"]) -> Source:
    project_file = root.parent / "pyproject.toml"
    try:
        project: dict[str, Any] = tomllib.loads(project_file.read_text(encoding="utf-8"))["project"]
    except (OSError, ValueError, KeyError) as exc:
        raise SandboxExecutionError(
            f"the package in {root} is neither installed nor part of a checkout: {project_file}: "
            f"{exc}",
            code="image-source",
            hint="install the package, or import it from the directory src of a checkout",
        ) from exc
    files: list[str] = []
    for folder, below, names in os.walk(root / _PACKAGE):
        below[:] = sorted(
            name for name in below if name != "__pycache__" and not name.startswith(".")
        )
        files += [
            (Path(folder) / name).relative_to(root).as_posix()
            for name in names
            if not name.startswith(".") and not name.endswith((".pyc", "~"))
        ]
    from union.sandbox._version import __version__

    license_file = root.parent / "LICENSE"
    return Source(
        kind=kind,
        root=root,
        files=tuple(sorted(files)),
        version=__version__.partition("+")[0],
        requires_python=project.get("requires-python", ""),
        requirements=tuple(sorted(_requirements(project))),
        scripts=tuple(sorted(f"{name} = {at}" for name, at in project.get("scripts", {}).items())),
        license_text=license_file.read_text(encoding="utf-8") if license_file.is_file() else "",
    )


def _requirements(project: dict[str, Any]) -> set[str]:
    """Return the requirements of a project, as an installed package lists them."""
    extras: dict[str, list[str]] = project.get("optional-dependencies", {})
    found = set(project.get("dependencies", []))
    for extra, needs in extras.items():
        for need in needs:
            # An extra may name other extras of the same project.
            others = re.fullmatch(rf"{re.escape(DISTRIBUTION)}\[([a-z,]+)\]", need)
            named = [need] if others is None else []
            for other in () if others is None else others[1].split(","):
                named += extras[other]
            found |= {f"{name}; extra == '{extra}'" for name in named}
    return found


def _metadata(source: Source, version: str) -> str:
    extras = sorted({need.rpartition("extra == ")[2].strip("'") for need in source.requirements
                     if "extra == " in need})  # fmt: skip
    return "\n".join(
        [
            "Metadata-Version: 2.4",
            f"Name: {DISTRIBUTION}",
            f"Version: {version}",
            f"Requires-Python: {source.requires_python}",
            *(f"Requires-Dist: {need}" for need in source.requirements),
            *(f"Provides-Extra: {extra}" for extra in extras),
            *(["License-File: LICENSE"] if source.license_text else []),
            "",
        ]
    )


def write_wheel(source: Source, place: Path) -> Wheel:
    """Write the wheel of ``source`` into the directory ``place``.

    Raises:
        SandboxExecutionError: this installation has no launcher for Linux.

    """
    if source.machine is None:
        raise SandboxExecutionError(
            f"an image needs the launcher for Linux, which this installation ({source.root}) lacks",
            code="image-source",
            hint="deploy from Linux, with the launcher compiled: `pip install .` without "
            "UNION_SANDBOX_SKIP_NATIVE, or `make setup` in a checkout",
        )
    contents = {name: (source.root / name).read_bytes() for name in source.files}
    programs = {name for name in contents if os.stat(source.root / name).st_mode & stat.S_IXUSR} | {
        _LAUNCHER
    }
    tag = f"py3-none-linux_{source.machine}"
    about = [tag, _metadata(source, source.version), *source.scripts, source.license_text]
    digest = hashlib.sha256("\0".join(about).encode())
    for name, data in contents.items():
        digest.update(f"\0{name}\0{name in programs}\0".encode() + hashlib.sha256(data).digest())
    # A part of a version that consists of digits only would be read as a number.
    version = f"{source.version}+code{digest.hexdigest()[:_DIGITS]}"
    info = f"{_FILE_NAME}-{version}.dist-info"
    contents[f"{info}/METADATA"] = _metadata(source, version).encode()
    contents[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {DISTRIBUTION}\nRoot-Is-Purelib: false\nTag: {tag}\n"
    ).encode()
    contents[f"{info}/entry_points.txt"] = "\n".join(
        ["[console_scripts]", *source.scripts, ""]
    ).encode()
    if source.license_text:
        contents[f"{info}/licenses/LICENSE"] = source.license_text.encode()
    record = f"{info}/RECORD"
    contents[record] = _record(contents, record).encode()
    path = place / f"{_FILE_NAME}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", compression=zipfile.ZIP_STORED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, date_time=_EPOCH)
            entry.create_system = 3  # Unix, so that the mode below counts.
            entry.external_attr = (stat.S_IFREG | (0o755 if name in programs else 0o644)) << 16
            archive.writestr(entry, data)
    return Wheel(
        path=path,
        source=source,
        version=version,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        names=tuple(contents),
    )


def _record(contents: dict[str, bytes], record: str) -> str:
    lines = []
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return "\n".join([*lines, f"{record},,"]) + "\n"


@functools.cache
def current_wheel() -> Wheel:
    """Return the wheel of this process, which is made at the first call and removed at the end."""
    place = Path(tempfile.mkdtemp(prefix="union-sandbox-wheel-"))
    weakref.finalize(find_source, shutil.rmtree, place, ignore_errors=True)
    return write_wheel(find_source(), place)

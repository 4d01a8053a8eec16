"""Workspaces as tar archives that any backend of the SDK can restore.

Hard links become copies. A symbolic link whose absolute target is below the root becomes relative,
if the archive alone proves that the relative form stays below the root; other links are kept.
"""

from __future__ import annotations

import copy
import io
import tarfile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from agents.sandbox.util.tar_utils import should_skip_tar_member, validate_tarfile

from union.sandbox.constants import MAX_FILE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["plain_archive", "portable_archive"]

MAX_LINKS: Final = 40
"""Links that one path may go through, as for the kernel."""


def portable_archive(
    source: io.BufferedIOBase, *, roots: Sequence[str], skip: Iterable[Path]
) -> io.BytesIO:
    """Return the archive of a workspace for the SDK.

    Args:
        source: the archive that the sandbox has made, which may contain anything.
        roots: absolute names of the root, for links that begin with one of them.
        skip: paths relative to the root to leave out.

    """
    target = io.BytesIO()
    links: list[tarfile.TarInfo] = []
    members: dict[str, tarfile.TarInfo] = {}
    skipped = list(skip)
    budget = _Budget()
    with (
        tarfile.open(fileobj=source, mode="r:") as old,
        tarfile.open(fileobj=target, mode="w") as new,
    ):
        new.addfile(_top())
        for found in old:
            name = _relative(found.name)
            if name == "." or should_skip_tar_member(name, skip_rel_paths=skipped, root_name=None):
                continue
            member = _renamed(found, name)
            members[_key(name)] = member
            if found.issym():
                links.append(member)
            elif found.isdir():
                new.addfile(member)
            elif found.isreg() or found.islnk():
                data = budget.read(old, found)
                member.type, member.linkname, member.size = tarfile.REGTYPE, "", len(data)
                new.addfile(member, io.BytesIO(data))
        for member in links:
            # The proof uses the links as they were found, whatever was rewritten before.
            written = copy.copy(member)
            relative = _rebased(member, roots)
            if relative is not None and _stays_below(members, member.name, relative):
                written.linkname = relative
            new.addfile(written)
    target.seek(0)
    return target


def plain_archive(source: io.IOBase) -> bytes:
    """Check an archive by the rules of the SDK; return it uncompressed.

    Raises:
        UnsafeTarMemberError: a member may not be restored.
        tarfile.TarError: it is not an archive.

    """
    target = io.BytesIO()
    budget = _Budget()
    with (
        tarfile.open(fileobj=source, mode="r:*") as old,  # type: ignore[call-overload]
        tarfile.open(fileobj=target, mode="w") as new,
    ):
        validate_tarfile(old, allow_external_symlink_targets=False)
        for found in old.getmembers():
            member = _renamed(found, found.name)
            if found.isreg():
                data = budget.read(old, found)
                member.size = len(data)
                new.addfile(member, io.BytesIO(data))
            else:
                new.addfile(member)
    return target.getvalue()


def _top() -> tarfile.TarInfo:
    member = tarfile.TarInfo(".")
    member.type, member.mode = tarfile.DIRTYPE, 0o755
    return member


class _Budget:
    """Reads contents up to a total: hard links, sparse files and compression multiply bytes."""

    def __init__(self) -> None:
        self._left = MAX_FILE_BYTES

    def read(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        try:
            content = None if member.issparse() else archive.extractfile(member)
        except KeyError:
            content = None  # a hard link whose target is not in the archive
        if content is None:
            raise tarfile.ReadError(f"{member.name!r:.200} has no content that can be read")
        with content:
            data = content.read(self._left + 1)
        self._left -= len(data)
        if self._left < 0:
            raise tarfile.ReadError(f"the contents exceed {MAX_FILE_BYTES} bytes")
        return data


def _renamed(member: tarfile.TarInfo, name: str) -> tarfile.TarInfo:
    """Return a member without the headers that override its name and its target."""
    new = copy.copy(member)
    new.name = name
    new.pax_headers = {}
    return new


def _relative(name: str) -> str:
    parts = [part for part in PurePosixPath(name).parts if part not in {".", "/"}]
    return "/".join([".", *parts])


def _key(name: str) -> str:
    return PurePosixPath(name).as_posix()


def _rebased(link: tarfile.TarInfo, roots: Sequence[str]) -> str | None:
    """Return the target of a link relative to its directory; None if it is not below a root.

    The components are kept as they are: ``..`` after a link is resolved by the kernel.
    """
    if not link.linkname.startswith("/"):
        return None
    target = "/" + link.linkname.lstrip("/")
    for root in roots:
        top = root.rstrip("/")
        if target != top and not target.startswith(f"{top}/"):
            continue
        rest = target[len(top) :].lstrip("/")
        up = [".."] * len(PurePosixPath(link.name).parent.parts)
        return "/".join([*up, rest] if rest else up) or "."
    return None


def _stays_below(members: Mapping[str, tarfile.TarInfo], name: str, target: str) -> bool:
    """Return whether a relative target is a member that is reached through members only."""
    todo = [*reversed(PurePosixPath(target).parts), *reversed(PurePosixPath(name).parent.parts)]
    at: list[str] = []
    links = 0
    while todo:
        part = todo.pop()
        if part == ".":
            continue
        if part == "..":
            if not at:
                return False
            at.pop()
            continue
        found = members.get("/".join([*at, part]))
        if found is None:
            return False
        if found.issym():
            links += 1
            if links > MAX_LINKS or found.linkname.startswith("/"):
                return False
            todo.extend(reversed(PurePosixPath(found.linkname).parts))
            continue
        if not (found.isdir() or (found.isreg() and not todo)):
            return False
        at.append(part)
    return True

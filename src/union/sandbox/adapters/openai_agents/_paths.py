"""Paths of a workspace: which the SDK may reach, and under which name the sandbox shows them."""

from __future__ import annotations

import posixpath
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

from agents.sandbox.errors import InvalidManifestPathError
from agents.sandbox.workspace_paths import WorkspacePathPolicy, coerce_posix_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agents.sandbox.manifest import Manifest
    from agents.sandbox.workspace_paths import SandboxPathGrant

__all__ = ["WorkspacePaths"]


class WorkspacePaths:
    """The root and the granted paths of a manifest.

    On this machine, a root or a grant whose name is a link is resolved once, here. So a link that
    is replaced later changes nothing. On a server the names are those of the sandbox.
    """

    def __init__(self, manifest: Manifest, *, is_on_host: bool) -> None:
        self._is_on_host = is_on_host
        self._real: dict[str, str] = {}
        self._key: object = None
        self.configure(manifest)

    def configure(self, manifest: Manifest) -> None:
        """Take the grants of a manifest; names that were resolved before keep their target."""
        key = (manifest.root, manifest.extra_path_grants)
        if key == self._key:
            return
        self._key = key
        grants = manifest.extra_path_grants
        self._real = {
            path: self._real.get(path) or self._resolved(path)
            for path in (manifest.root, *(grant.path for grant in grants))
        }
        self.root = self._real[manifest.root]
        self.grants: tuple[SandboxPathGrant, ...] = tuple(
            grant.model_copy(update={"path": self._real[grant.path]}) for grant in grants
        )
        self._policy = WorkspacePathPolicy(root=self.root, extra_path_grants=self.grants)

    def _resolved(self, path: str) -> str:
        if not self._is_on_host:
            return posixpath.normpath(path)
        return str(Path(path).resolve())

    def lexical(self, path: str | PurePath) -> str:
        """Return an absolute path under the names that the sandbox shows; reads no file."""
        text = coerce_posix_path(path).as_posix()
        if not text.startswith("/"):
            joined = posixpath.normpath(f"{self.root}/{text}")
            if not _is_below(joined, self.root):
                raise invalid(path)
            return joined
        text = posixpath.normpath(text)
        for name in sorted(self._real, key=len, reverse=True):
            if _is_below(text, name):
                return posixpath.normpath(f"{self._real[name]}/{text[len(name) :]}")
        return text

    def normalize(self, path: str | PurePath, *, for_write: bool) -> Path:
        """Return a permitted path; raise the SDK's error for another. Reads no file."""
        try:
            return self._policy.normalize_path(self.lexical(path), for_write=for_write)
        except InvalidManifestPathError as exc:
            raise invalid(path) from exc

    def check_recursive_remove(self, path: str | PurePath) -> None:
        """Raise the SDK's error if a tree contains a grant that is read-only."""
        self._policy.validate_recursive_remove(path)

    def mounts(self) -> tuple[tuple[str, bool], ...]:
        """Return the grants outside the root as paths and whether each is read-only."""
        found: dict[str, bool] = {}
        for grant in self.grants:
            if not _is_below(grant.path, self.root):
                found.setdefault(grant.path, grant.read_only)
        # A grant that only repeats the one around it needs no mount of its own.
        return tuple(
            (path, read_only)
            for path, read_only in sorted(found.items())
            if found.get(_enclosing(path, found) or "") is not read_only
        )

    def is_grant(self, path: str) -> bool:
        """Return whether a path is a granted one, which is a mount point inside."""
        return any(path == found for found, _ in self.mounts())

    def grant_of(self, path: str) -> str | None:
        """Return the innermost granted path that contains a path; None below the root."""
        if _is_below(path, self.root):
            return None
        found = [grant.path for grant in self.grants if _is_below(path, grant.path)]
        return max(found, key=len, default=None)


def invalid(path: str | PurePath) -> InvalidManifestPathError:
    """Return the SDK's error for a path outside the workspace and the grants."""
    given = coerce_posix_path(path)
    reason: Literal["absolute", "escape_root"] = (
        "absolute" if given.is_absolute() else "escape_root"
    )
    return InvalidManifestPathError(rel=given.as_posix(), reason=reason)


def _enclosing(path: str, paths: Iterable[str]) -> str | None:
    around = [other for other in paths if other != path and _is_below(path, other)]
    return max(around, key=len, default=None)


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(f"{top.rstrip('/')}/")

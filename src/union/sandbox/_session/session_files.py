"""SessionFiles: the file operations of a session, on top of any transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox import constants
from union.sandbox._core.files import VENV_DIR
from union.sandbox._session.own_loop import in_own_loop
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import asyncio
    import os

    from union.sandbox._core.files import FileInfo, Transfer
    from union.sandbox._session.lifecycle import Lifecycle
    from union.sandbox._session.transfer import Progress
    from union.sandbox._session.transport import Transport

__all__ = ["SessionFiles", "checked_flag"]


class SessionFiles:
    """File operations in the work dir. ``Session`` inherits them.

    Paths are relative to the work dir, or absolute below it. Symbolic links are never followed.
    With ``persist="machine"``, a helper inside the sandbox performs them, with its rights: paths
    are any that are visible inside, and links are followed.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def _live(self) -> Transport:
        """Return the transport of the open session, or raise ``SessionClosedError``."""
        return self._lifecycle.live()

    @property
    def _own_loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop that the session belongs to; None before it is opened."""
        return self._lifecycle.loop

    def fs_allowlist(self) -> dict[str, tuple[str, ...]]:
        """Return the paths visible inside, by ``"read_only"`` and ``"read_write"``."""
        transport = self._lifecycle.transport
        if self._lifecycle.state != "open" or transport is None:
            transport = self._live()  # raises the reason
        return transport.fs_allowlist()

    @in_own_loop
    async def put_bytes(
        self,
        path: str,
        data: bytes,
        *,
        mode: int = 0o644,
        overwrite: bool = True,
        exclusive: bool = False,
    ) -> int:
        """Write a file atomically, creating its parent directories; return the number of bytes.

        With ``persist="machine"``, a file that exists is written in place, through links.

        Args:
            path: a path in the work dir.
            data: the content, bytes-like.
            mode: permission bits from 0 to 0o777; 0o644 by default.
            overwrite: whether to replace an existing file; True by default.
            exclusive: whether the file must be a new one, as ``overwrite=False``; False by default.

        Raises:
            SandboxFileExistsError: the file exists and may not be replaced.
            SandboxPathError: the path is outside the work dir or goes through a link.

        """
        transport = self._live()
        is_new = checked_flag(exclusive, "exclusive")
        overwrite = checked_flag(overwrite, "overwrite") and not is_new
        return await transport.put(path, data, mode=mode, overwrite=overwrite)

    @in_own_loop
    async def get_bytes(self, path: str, *, max_bytes: int = 0) -> bytes:
        """Return the content of a regular file.

        Args:
            path: a path in the work dir.
            max_bytes: the largest size to accept, in bytes; 0 (default) for 1 GiB.

        Raises:
            SandboxFileNotFoundError: the file does not exist.
            SandboxFileTooLargeError: the file is larger than ``max_bytes``.
            SandboxPathError: the path is outside the work dir or goes through a link.

        """
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
            raise SandboxUsageError(
                f"max_bytes must be a whole number of bytes, or 0 for the session's limit, "
                f"not {max_bytes!r}",
                argument="max_bytes",
            )
        return await self._live().get(path, max_bytes=max_bytes or constants.MAX_FILE_BYTES)

    @in_own_loop
    async def list_dir(self, path: str = ".") -> tuple[FileInfo, ...]:
        """Return the entries of a directory, sorted by path. Links are described, not followed.

        The session venv, ``.sandbox-venv`` in the work dir, is left out.

        Args:
            path: a directory in the work dir; the work dir itself by default.

        """
        entries = await self._live().list_dir(path)
        return tuple(entry for entry in entries if entry.path != VENV_DIR)

    @in_own_loop
    async def stat(self, path: str) -> FileInfo:
        """Return the description of a file, directory or link. Links are not followed.

        Args:
            path: a path in the work dir; ``"."`` for the work dir itself.

        """
        return await self._live().stat(path)

    @in_own_loop
    async def exists(self, path: str) -> bool:
        """Return whether a path exists in the work dir. A dangling link exists.

        Args:
            path: a path in the work dir.

        """
        try:
            await self._live().stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @in_own_loop
    async def make_dir(self, path: str, *, parents: bool = True, exist_ok: bool = True) -> None:
        """Create a directory. Succeeds if it already exists.

        Args:
            path: a path in the work dir.
            parents: whether to create missing parent directories; True by default.
            exist_ok: whether to accept an existing directory; True by default.

        Raises:
            SandboxFileExistsError: the path is a file, or exists and ``exist_ok`` is false.

        """
        transport = self._live()
        parents, exist_ok = checked_flag(parents, "parents"), checked_flag(exist_ok, "exist_ok")
        await transport.make_dir(path, parents=parents, exist_ok=exist_ok)

    @in_own_loop
    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link (not its target) or a directory.

        Args:
            path: a path below the work dir.
            recursive: whether to remove a directory that is not empty; False by default.

        Raises:
            SandboxFileNotFoundError: the path does not exist.
            SandboxFileError: the directory is not empty and ``recursive`` is false.

        """
        transport = self._live()
        await transport.remove(path, recursive=checked_flag(recursive, "recursive"))

    @in_own_loop
    async def upload(
        self,
        local: str | os.PathLike[str],
        path: str,
        *,
        overwrite: bool = True,
        max_bytes: int = 0,
        max_files: int = 0,
        progress: Progress | None = None,
    ) -> Transfer:
        """Copy a local file to ``path``, or the content of a local directory into ``path``.

        Links and special files of a directory are skipped; the result names them. The limits are
        checked before the first byte is copied.

        Args:
            local: a file or directory of the caller.
            path: the target in the work dir.
            overwrite: whether to replace existing files; True by default.
            max_bytes: the largest total size, in bytes; 0 (default) for 1 GiB.
            max_files: the most entries, directories included; 0 (default) for 100,000.
            progress: called as ``progress(bytes_done, bytes_total, path)``; ``bytes_total`` is
                None while the entries are counted. None (default) for no calls.

        Raises:
            SandboxFileTooLargeError: a limit is exceeded.
            SandboxFileExistsError: a file exists and ``overwrite`` is false.

        """
        from union.sandbox._session import transfer

        options = transfer.checked_options(
            self._live,
            overwrite=overwrite,
            max_bytes=max_bytes,
            max_files=max_files,
            progress=progress,
        )
        return await transfer.upload(local, path, options)

    @in_own_loop
    async def download(
        self,
        path: str,
        local: str | os.PathLike[str],
        *,
        overwrite: bool = True,
        max_bytes: int = 0,
        max_files: int = 0,
        progress: Progress | None = None,
    ) -> Transfer:
        """Copy a file to ``local``, or the content of a directory into the directory ``local``.

        Nothing is written outside ``local``, no link in it is followed, and set-id bits are
        dropped. A file that is replaced during the copy is skipped; the result names it.

        Args:
            path: a file or directory in the work dir.
            local: the target on the side of the caller; parent directories are created.
            overwrite: whether to replace existing files; True by default.
            max_bytes: the largest total size, in bytes; 0 (default) for 1 GiB.
            max_files: the most entries, directories included; 0 (default) for 100,000.
            progress: as for ``upload()``; None (default) for no calls.

        Raises:
            SandboxFileTooLargeError: a limit is exceeded.
            SandboxFileExistsError: a file exists and ``overwrite`` is false.

        """
        from union.sandbox._session import transfer

        options = transfer.checked_options(
            self._live,
            overwrite=overwrite,
            max_bytes=max_bytes,
            max_files=max_files,
            progress=progress,
        )
        return await transfer.download(path, local, options)


def checked_flag(value: object, argument: str) -> bool:
    """Return a flag; raise if it is neither True nor False."""
    if not isinstance(value, bool):
        raise SandboxUsageError(
            f"{argument} must be True or False, not {value!r}", argument=argument
        )
    return value

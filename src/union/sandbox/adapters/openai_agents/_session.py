"""The sandbox session of the Agents SDK over a session of ``union.sandbox``."""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from agents.sandbox.errors import (
    ExecNonZeroError,
    ExecTimeoutError,
    ExecTransportError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceRootNotFoundError,
    WorkspaceStartError,
    WorkspaceStopError,
)
from agents.sandbox.manifest import Manifest
from agents.sandbox.session import SandboxSessionState
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.workspace_payloads import coerce_write_payload
from agents.sandbox.types import ExecResult
from agents.sandbox.util.tar_utils import UnsafeTarMemberError

from union.sandbox._core.files import VENV_DIR
from union.sandbox._linux.removal import remove_tree
from union.sandbox.adapters._common import LazySession
from union.sandbox.adapters.openai_agents import _files, _grants
from union.sandbox.adapters.openai_agents._archive import plain_archive, portable_archive
from union.sandbox.adapters.openai_agents._paths import WorkspacePaths, invalid
from union.sandbox.adapters.openai_agents._pty import Terminals
from union.sandbox.constants import PIPE
from union.sandbox.errors import SandboxError, SessionClosedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agents.sandbox.files import FileEntry
    from agents.sandbox.materialization import MaterializationResult
    from agents.sandbox.session.pty_types import PtyExecUpdate
    from agents.sandbox.types import User

    from union.sandbox._session.process import SandboxProcess
    from union.sandbox._session.session import Session

__all__ = ["DEFAULT_ROOT", "UnionSandboxSession", "UnionSandboxSessionState"]

DEFAULT_ROOT: Final[str] = Manifest.model_fields["root"].default
"""The root of a manifest that names none."""
_INCOMPLETE: Final = (
    "The file was created, but its content is incomplete. Inspect the destination, then update or "
    "remove it."
)


class UnionSandboxSessionState(SandboxSessionState):
    """The state of a session, for ``UnionSandboxClient.resume()``.

    It contains no policy: the network, the limits and the server are those of the client that
    resumes it.
    """

    type: Literal["union"] = "union"
    workspace_root_owned: bool = False
    """Whether the workspace is private and ends with the sandbox."""
    sandbox_id: str | None = None
    """The id of a sandbox on a server, which a client of the same process attaches to."""


class UnionSandboxSession(BaseSandboxSession):
    """A workspace in a sandbox.

    On this machine its root is a directory of this machine, which is shown under its own name. On
    a server, and with a session that was given, it is the work dir.
    """

    state: UnionSandboxSessionState

    def __init__(
        self,
        *,
        state: UnionSandboxSessionState,
        session: object = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.state = state
        self._options = dict(options or {})
        self._given = session
        self._is_on_host = session is None and self._options.get("endpoint") is None
        self._paths = WorkspacePaths(state.manifest, is_on_host=self._is_on_host)
        self._box: LazySession | None = None
        self._mounts: tuple[tuple[str, bool], ...] = ()
        self._terminals = Terminals()
        self._is_running = False

    @classmethod
    def from_state(cls, state: UnionSandboxSessionState) -> UnionSandboxSession:
        """Return a session for a state, with the default options.

        Args:
            state: the state of a session.

        """
        return cls(state=state)

    # The sandbox.

    async def _open(self) -> Session:
        """Return the sandbox, opened at its first use, with the grants that exist now."""
        self._paths.configure(self.state.manifest)
        mounts = self._paths.mounts()
        if self._is_on_host and mounts:
            mounts = await asyncio.to_thread(_existing, mounts)
        if self._box is not None and mounts != self._mounts and self._given is None:
            # A sandbox has the mounts that it was opened with.
            await self._terminals.end_all()
            await self._end_box()
        if self._box is None:
            self._mounts = mounts
            self._box = self._new_box()
        session = await self._box.opened()
        if not self._is_on_host and self._given is None:
            self.state.sandbox_id = session.id
        return session

    def _new_box(self) -> LazySession:
        if self._given is not None:
            return LazySession(self._given)
        options = dict(self._options)
        if self._is_on_host:
            # The work dir of the session is another, so that its venv is not in the workspace.
            for name, wanted in (("read_only_paths", True), ("read_write_paths", False)):
                paths = [path for path, read_only in self._mounts if read_only is wanted]
                options[name] = [*options.get(name, ()), *paths]
            options["read_write_paths"].append(self._paths.root)
        else:
            options["work_dir_name"] = self._paths.root
        return LazySession(options=options)

    async def _end_box(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.aclose()

    async def end(self) -> None:
        """End the sandbox, and remove a workspace that was made for it."""
        self._is_running = False
        await self._terminals.end_all()
        await self._end_box()
        if self._is_on_host and self.state.workspace_root_owned:
            with contextlib.suppress(FileNotFoundError):
                await asyncio.to_thread(remove_tree, self._paths.root)

    def adopt(self, box: LazySession) -> None:
        """Use a sandbox that is open in this process, whose files are there still."""
        self._box = box
        self._paths.configure(self.state.manifest)
        self._mounts = self._paths.mounts()
        self._set_start_state_preserved(True)

    # Life cycle.

    async def _prepare_backend_workspace(self) -> None:
        try:
            await self._make_root()
            await self._open()
        except (OSError, SandboxError) as exc:
            raise WorkspaceStartError(path=Path(self.state.manifest.root), cause=exc) from exc

    async def _make_root(self) -> None:
        if self._is_on_host:
            await asyncio.to_thread(_grants.make_directory, self._paths.root)

    async def _after_start(self) -> None:
        self._is_running = True

    async def _after_start_failed(self) -> None:
        self._is_running = False

    async def _after_shutdown(self) -> None:
        """End the sandbox; that of a server has the files, so the client's ``delete()`` ends it."""
        self._is_running = False
        if self._is_on_host:
            await self._end_box()

    def _wrap_stop_error(self, error: Exception) -> Exception:
        return WorkspaceStopError(path=Path(self.state.manifest.root), cause=error)

    async def running(self) -> bool:
        """Return whether the session was started and not shut down."""
        return self._is_running

    async def _apply_manifest(
        self, *, only_ephemeral: bool = False, provision_accounts: bool = True
    ) -> MaterializationResult:
        self._refuse_accounts()
        return await super()._apply_manifest(
            only_ephemeral=only_ephemeral, provision_accounts=provision_accounts
        )

    async def provision_manifest_accounts(self) -> None:
        """Refuse users and groups: a sandbox has one user."""
        self._refuse_accounts()

    def _refuse_accounts(self) -> None:
        if self.state.manifest.users or self.state.manifest.groups:
            raise ValueError("this sandbox has one user; remove users and groups of the manifest")

    # Commands.

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: str | User | None
    ) -> list[str]:
        if user is not None:
            raise ValueError(f"a command in this sandbox cannot run as {user!r}: it has one user")
        # A login shell would replace the PATH of the sandbox.
        prefix = ["sh", "-c"] if shell is True else shell
        parts: list[str] = super()._prepare_exec_command(*command, shell=prefix, user=None)
        return parts

    async def _start(self, command: tuple[str | Path, ...], **arguments: Any) -> SandboxProcess:
        root = self._paths.root
        if self._is_on_host and not await asyncio.to_thread(Path(root).exists):
            raise WorkspaceRootNotFoundError(path=Path(root))
        try:
            session = await self._open()
            env = {**await self.state.manifest.environment.resolve(), "HOME": root}
            return await session.run(
                [self._shown(part) for part in command],
                cwd=root,
                env=env,
                stdout=PIPE,
                stderr=None if arguments.get("pty") else PIPE,
                **arguments,
            )
        except (SandboxError, OSError, ValueError) as exc:
            raise ExecTransportError(command=command, cause=exc) from exc

    def _shown(self, part: str | Path) -> str:
        """Return an argument; a root whose name is a link gets the name that is shown inside."""
        text, root = str(part), self.state.manifest.root.rstrip("/")
        if root != self._paths.root and (text == root or text.startswith(f"{root}/")):
            return self._paths.root + text[len(root) :]
        return text

    async def _exec_internal(
        self,
        *command: str | Path,
        timeout: float | None = None,  # noqa: ASYNC109 - its signature
    ) -> ExecResult:
        process = await self._start(command, timeout_s=timeout)
        try:
            out, err = await process.communicate()
        except (SandboxError, OSError) as exc:
            raise ExecTransportError(command=command, cause=exc) from exc
        except BaseException:
            process.kill()
            raise
        if process.termination_reason == "timeout":
            raise ExecTimeoutError(command=command, timeout_s=timeout)
        if process.termination_reason == "closed":
            closed = SessionClosedError("the sandbox was closed during the command")
            raise ExecTransportError(command=command, cause=closed)
        return ExecResult(stdout=out, stderr=err, exit_code=process.returncode or 0)

    def supports_pty(self) -> bool:
        """Return whether commands can have a terminal: they can."""
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,  # noqa: ASYNC109 - its signature
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Start a command that goes on after this call; return its first output."""
        del timeout
        parts = self._prepare_exec_command(*command, shell=shell, user=user)
        more: dict[str, Any] = {"pty": True, "stdin": PIPE} if tty else {}
        process = await self._start(tuple(parts), background=True, **more)
        return await self._terminals.add(
            process,
            has_terminal=tty,
            yield_time_s=yield_time_s,
            max_output_tokens=max_output_tokens,
        )

    async def pty_write_stdin(
        self,
        *,
        session_id: int,
        chars: str,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> PtyExecUpdate:
        """Type text into a command with a terminal; return its output since the last call."""
        return await self._terminals.write(
            session_id, chars, yield_time_s=yield_time_s, max_output_tokens=max_output_tokens
        )

    async def pty_terminate_all(self) -> None:
        """Kill every command that goes on."""
        await self._terminals.end_all()

    # Paths.

    def normalize_path(self, path: Path | str, *, for_write: bool = False) -> Path:
        """Return a permitted path as the sandbox names it; links are followed when it is used."""
        self._paths.configure(self.state.manifest)
        return self._paths.normalize(path, for_write=for_write)

    def _workspace_root_path(self) -> Path:
        return Path(self._paths.root)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        _, found = await self._reach(path, for_write=for_write)
        return Path(found)

    async def _reach(
        self, path: Path | str, *, for_write: bool = False, is_entry: bool = False
    ) -> tuple[Session, str]:
        """Return the sandbox and the path that a name stands for, which is permitted.

        With ``is_entry``, the last component is not followed.
        """
        self._paths.configure(self.state.manifest)
        name = self._paths.lexical(path)
        self._paths.normalize(name, for_write=False)
        if for_write:
            await self._make_missing(name)
        session = await self._open()
        found = await _files.resolve(session, name, is_entry=is_entry)
        try:
            self._paths.normalize(found, for_write=for_write)
        except WorkspaceArchiveWriteError:
            raise
        except Exception as exc:
            raise invalid(path) from exc
        # The check that a subclass may replace is the last step before the operation.
        return session, str(self.normalize_path(found, for_write=for_write))

    def _is_granted(self, path: str) -> bool:
        return self._paths.grant_of(path) == path

    async def _make_missing(self, name: str) -> None:
        """Create the root, or a granted directory that is to be written to and does not exist."""
        if not self._is_on_host:
            return
        grant = self._paths.grant_of(name)
        if grant is None:
            await self._make_root()
        elif grant != name and not await asyncio.to_thread(_grants.exists, grant):
            try:
                await asyncio.to_thread(_grants.make_directory, grant)
            except OSError as exc:
                raise WorkspaceArchiveWriteError(path=Path(grant), cause=exc) from exc

    # Files.

    async def ls(self, path: Path | str, *, user: str | User | None = None) -> list[FileEntry]:
        """Return the entries of a directory."""
        self._refuse_user(user)
        session, found = await self._reach(path)
        try:
            return await _files.list_entries(session, found)
        except OSError as exc:
            _raise_nonzero(exc, "ls", "-la", "--", found)

    async def mkdir(
        self, path: Path | str, *, parents: bool = False, user: str | User | None = None
    ) -> None:
        """Create a directory. Succeeds if it already exists."""
        self._refuse_user(user)
        session, found = await self._reach(path, for_write=True)
        try:
            await _files.make_dir(session, found, parents=parents)
        except OSError as exc:
            raise WorkspaceArchiveWriteError(path=Path(found), cause=exc) from exc

    async def rm(
        self, path: Path | str, *, recursive: bool = False, user: str | User | None = None
    ) -> None:
        """Remove a file, or with ``recursive`` a tree."""
        self._refuse_user(user)
        if recursive and self._is_on_host and await self._remove_directory(path):
            return
        session, found = await self._reach(path, for_write=True)
        if recursive:
            self._paths.check_recursive_remove(found)
        try:
            if self._is_on_host and self._paths.is_grant(found):
                if recursive:
                    await _files.remove_content(session, found)
                await asyncio.to_thread(_grants.remove_grant, found)
            else:
                await _files.remove(session, found, recursive=recursive)
        except FileNotFoundError as exc:
            if not recursive:
                _raise_nonzero(exc, "rm", "--", found)
        except OSError as exc:
            raise WorkspaceArchiveWriteError(path=Path(found), cause=exc) from exc

    async def _remove_directory(self, path: Path | str) -> bool:
        """Remove a directory of the workspace through descriptors; False if a link leads there."""
        self._paths.configure(self.state.manifest)
        name = self._paths.lexical(path)
        is_below_root = name.startswith(f"{self._paths.root.rstrip('/')}/")
        try:
            if not is_below_root or not await asyncio.to_thread(_grants.is_directory, name):
                return False
            self._paths.check_recursive_remove(name)
            found = str(self.normalize_path(name, for_write=True))
            await _grants.completed(asyncio.to_thread(_grants.remove_directory, found))
        except OSError as exc:
            raise WorkspaceArchiveWriteError(path=Path(name), cause=exc) from exc
        return True

    async def _remove_workspace_entry_on_resume(self, path: Path) -> None:
        session, found = await self._reach(path, for_write=True, is_entry=True)
        self._paths.check_recursive_remove(found)
        try:
            await _files.remove(session, found, recursive=True)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise WorkspaceArchiveWriteError(path=Path(found), cause=exc) from exc

    async def mv(
        self,
        source: Path | str,
        destination: Path | str,
        *,
        user: str | User | None = None,
    ) -> None:
        """Rename a regular file or a link, replacing the destination."""
        self._refuse_user(user)
        _, old = await self._reach(source, for_write=True, is_entry=True)
        session, new = await self._reach(destination, for_write=True, is_entry=True)
        try:
            if self._is_on_host and self._paths.is_grant(old) and self._is_granted(new):
                await asyncio.to_thread(_grants.rename_grant, old, new)
            else:
                await _files.rename(session, old, new)
        except OSError as exc:
            _raise_nonzero(exc, "mv", "-fT", "--", old, new)

    async def same_file(
        self,
        left: Path | str,
        right: Path | str,
        *,
        follow_symlinks: bool = True,
        user: str | User | None = None,
    ) -> bool:
        """Return whether two paths name the same file."""
        self._refuse_user(user)
        is_entry = not follow_symlinks
        _, one = await self._reach(left, is_entry=is_entry)
        session, other = await self._reach(right, is_entry=is_entry)
        try:
            return await _files.same_file(session, one, other, is_entry=is_entry)
        except OSError as exc:
            _raise_nonzero(exc, "test", one, "-ef", other)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        """Return the content of a file as a stream."""
        self._refuse_user(user)
        session, found = await self._reach(path)
        try:
            return io.BytesIO(await _files.read(session, found))
        except FileNotFoundError as exc:
            raise WorkspaceReadNotFoundError(path=path, cause=exc) from exc
        except OSError as exc:
            raise WorkspaceArchiveReadError(path=path, cause=exc) from exc

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        session, found = await self._reach(path)
        return await _files.read(session, found, max_bytes=max_bytes)

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Write a file; missing directories are created."""
        self._refuse_user(user)
        content = coerce_write_payload(path=path, data=data).stream.read()
        session, found = await self._reach(path, for_write=True)
        try:
            await _files.write(session, found, content)
        except OSError as exc:
            raise WorkspaceArchiveWriteError(path=Path(found), cause=exc) from exc

    async def _write_new_file(
        self, path: Path, data: io.IOBase, *, user: str | User | None = None
    ) -> None:
        self._refuse_user(user)
        content = coerce_write_payload(path=path, data=data).stream.read()
        session, found = await self._reach(path, for_write=True, is_entry=True)
        try:
            await _files.write_new(session, found, content)
        except FileExistsError:
            await self._reach(path, for_write=True)  # a link that leads outside is another error
            raise
        except OSError as exc:
            if _files.is_incomplete(exc):
                raise WorkspaceArchiveWriteError(
                    path=Path(found), cause=exc, retryable=False, message=_INCOMPLETE
                ) from exc
            raise WorkspaceArchiveWriteError(path=Path(found), cause=exc) from exc

    def _refuse_user(self, user: str | User | None) -> None:
        if user is not None:
            raise ValueError(f"files in this sandbox cannot be used as {user!r}: it has one user")

    # Archives.

    def _persist_workspace_skip_relpaths(self) -> set[Path]:
        skipped: set[Path] = super()._persist_workspace_skip_relpaths()
        return skipped if self._is_on_host else skipped | {Path(VENV_DIR)}

    async def persist_workspace(self) -> io.IOBase:
        """Return the workspace as a tar archive that every backend of the SDK can restore."""
        root = Path(self._paths.root)
        if self._is_on_host and not await asyncio.to_thread(root.exists):
            raise WorkspaceArchiveReadError(
                path=root, context={"reason": "workspace_root_not_found"}
            )
        skip = self._persist_workspace_skip_relpaths()
        exclude = [path.as_posix() for path in skip if path.parts]
        found = io.BytesIO()
        try:
            session = await self._open()
            async for piece in session.archive(str(root), exclude=exclude):
                found.write(piece)
            found.seek(0)
            roots = (str(root), self.state.manifest.root)
            return await asyncio.to_thread(portable_archive, found, roots=roots, skip=skip)
        except (tarfile.TarError, OSError, SandboxError) as exc:
            raise WorkspaceArchiveReadError(path=root, cause=exc) from exc

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Unpack a tar archive into the workspace; it is checked as a whole first."""
        content = await self._checked_archive(data)
        try:
            await self._make_root()
            session = await self._open()
            await session.extract(self._paths.root, content)
        except (OSError, SandboxError) as exc:
            raise WorkspaceArchiveWriteError(path=Path(self._paths.root), cause=exc) from exc

    async def _checked_archive(self, data: io.IOBase) -> bytes:
        root = Path(self._paths.root)
        try:
            return await asyncio.to_thread(plain_archive, data)
        except UnsafeTarMemberError as exc:
            context = {"reason": exc.reason, "member": exc.member}
            raise WorkspaceArchiveWriteError(path=root, context=context, cause=exc) from exc
        except (tarfile.TarError, OSError) as exc:
            raise WorkspaceArchiveWriteError(path=root, cause=exc) from exc

    async def _restore_snapshot_into_workspace_on_resume(self) -> None:
        """Replace the files by those of the snapshot, which is checked before any is removed."""
        archive = await self.state.snapshot.restore(dependencies=self.dependencies)
        try:
            content = await self._checked_archive(archive)
        finally:
            archive.close()
        await self._clear_workspace_root_on_resume()
        await self.hydrate_workspace(io.BytesIO(content))


def _existing(mounts: tuple[tuple[str, bool], ...]) -> tuple[tuple[str, bool], ...]:
    return tuple((path, read_only) for path, read_only in mounts if _grants.exists(path))


def _raise_nonzero(error: OSError, *command: str) -> NoReturn:
    """Raise the SDK's error for a command that has failed."""
    result = ExecResult(stdout=b"", stderr=str(error).encode(), exit_code=1)
    raise ExecNonZeroError(result, command=command, cause=error) from error

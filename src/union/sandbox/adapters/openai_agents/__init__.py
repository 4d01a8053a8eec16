"""OpenAI Agents SDK: a sandbox client whose workspaces are sandboxes.

``RunConfig(sandbox=SandboxRunConfig(client=UnionSandboxClient()))`` runs a ``SandboxAgent`` in one.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from typing import TYPE_CHECKING, Any, Final, Literal

from union.sandbox.adapters._common import LazySession, require_framework

require_framework("agents.sandbox", extra="openai-agents")

from agents.sandbox.manifest import Manifest  # noqa: E402 - the check comes first
from agents.sandbox.session.manager import Instrumentation  # noqa: E402 - the check comes first
from agents.sandbox.session.sandbox_client import (  # noqa: E402 - the check comes first
    BaseSandboxClient,
    BaseSandboxClientOptions,
)
from agents.sandbox.snapshot import resolve_snapshot  # noqa: E402 - the check comes first

from union.sandbox.adapters.openai_agents._session import (  # noqa: E402 - the check comes first
    DEFAULT_ROOT,
    UnionSandboxSession,
    UnionSandboxSessionState,
)
from union.sandbox.errors import SandboxUsageError, SessionClosedError  # noqa: E402 - see above

if TYPE_CHECKING:
    from agents.sandbox.session import SandboxSession, SandboxSessionState
    from agents.sandbox.session.dependencies import Dependencies
    from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec

__all__ = [
    "UnionSandboxClient",
    "UnionSandboxClientOptions",
    "UnionSandboxSession",
    "UnionSandboxSessionState",
]


PREFIX: Final = "sandbox-workspace-"
"""The beginning of the names of workspaces that are made here."""


class UnionSandboxClientOptions(BaseSandboxClientOptions):
    """Options of one session. Those of the sandbox are arguments of ``UnionSandboxClient``."""

    type: Literal["union"] = "union"
    exposed_ports: tuple[int, ...] = ()
    """Ports that the agent may ask for; none can be reached from this machine."""

    def __init__(
        self,
        exposed_ports: tuple[int, ...] = (),
        *,
        type: Literal["union"] = "union",  # noqa: A002 - a field of the SDK
    ) -> None:
        super().__init__(type=type, exposed_ports=exposed_ports)


class UnionSandboxClient(BaseSandboxClient[UnionSandboxClientOptions | None]):
    """Creates sandboxes for agents, on this machine or on a server.

    A manifest without a root gets a directory of its own, which ``delete()`` removes. Another root
    is a directory of this machine, which is kept; on a server it is the name of the work dir. The
    policy is the client's: a state that is resumed cannot extend it.

    Args:
        session: a session to use for every workspace, which is not closed here; None (default)
            opens one for each.
        instrumentation: the SDK's instrumentation; None (default) for its own default.
        dependencies: the SDK's dependencies; None (default) for none.
        **options: arguments of ``on_device.session()``, or of ``remote.session()`` if ``endpoint``
            is among them.

    """

    backend_id = "union"
    supports_default_options = True

    def __init__(
        self,
        *,
        session: object = None,
        instrumentation: Instrumentation | None = None,
        dependencies: Dependencies | None = None,
        **options: Any,
    ) -> None:
        LazySession(session, options=options)  # checks that not both were given
        for name in ("host_work_dir", "work_dir_name"):
            if options.get(name) is not None:
                raise SandboxUsageError(
                    f"{name} is the root of the manifest here",
                    argument=name,
                    hint="Manifest(root=...)",
                )
        self._session = session
        self._options = {name: value for name, value in options.items() if value is not None}
        self._instrumentation = Instrumentation() if instrumentation is None else instrumentation
        self._dependencies = dependencies

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: UnionSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """Return a new session; its sandbox is opened when it starts.

        Args:
            snapshot: where its files are kept when it stops; None (default) for nowhere.
            manifest: the content of the workspace; None (default) for nothing.
            options: options of this session; None (default) for the defaults.

        """
        manifest = Manifest() if manifest is None else manifest
        _refuse_host_paths(manifest)
        self._validate_manifest_for_create(manifest)
        is_owned = manifest.root == DEFAULT_ROOT and self._session is None
        if self._session is not None:
            manifest = _at(manifest, (await LazySession(self._session).opened()).work_dir)
        elif is_owned and "endpoint" not in self._options:
            manifest = _at(manifest, await asyncio.to_thread(tempfile.mkdtemp, prefix=PREFIX))
        number = uuid.uuid4()
        state = UnionSandboxSessionState(
            session_id=number,
            manifest=manifest,
            snapshot=resolve_snapshot(snapshot, str(number)),
            workspace_root_owned=is_owned,
            exposed_ports=() if options is None else options.exposed_ports,
        )
        return self._wrapped(self._made(state))

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Return a session for a state, with a new sandbox over the same workspace.

        On a server the workspace ends with its sandbox: the session gets that of the state if it is
        open in this process; otherwise the files are those of the snapshot.

        Args:
            state: the state of a session of this client.

        """
        if not isinstance(state, UnionSandboxSessionState):
            raise TypeError("UnionSandboxClient.resume expects a UnionSandboxSessionState")
        state.assert_path_grants_rebound()
        _refuse_host_paths(state.manifest)
        inner = self._made(state)
        if state.sandbox_id is not None and "endpoint" in self._options:
            box = LazySession(session_id=state.sandbox_id)
            try:
                await box.opened()
            except SessionClosedError:
                state.sandbox_id = None
                state.workspace_root_ready = False
            else:
                inner.adopt(box)
        return self._wrapped(inner)

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """End the sandbox of a session; a private workspace is removed.

        Args:
            session: a session of this client.

        """
        inner = session._inner  # noqa: SLF001 - as every client of the SDK does
        if not isinstance(inner, UnionSandboxSession):
            raise TypeError("UnionSandboxClient.delete expects a UnionSandboxSession")
        await inner.end()
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        """Return the state that a payload contains.

        Args:
            payload: a state as JSON values.

        """
        return self._deserialize_session_state_payload(payload, UnionSandboxSessionState)

    def _made(self, state: UnionSandboxSessionState) -> UnionSandboxSession:
        return UnionSandboxSession(state=state, session=self._session, options=self._options)

    def _wrapped(self, inner: UnionSandboxSession) -> SandboxSession:
        return self._wrap_session(inner, instrumentation=self._instrumentation)


def _at(manifest: Manifest, root: str) -> Manifest:
    return manifest.model_copy(update={"root": root}, deep=True)


def _refuse_host_paths(manifest: Manifest) -> None:
    for grant in manifest.extra_path_grants:
        if grant.host_path is not None:
            raise ValueError(
                f"the grant {grant.path!r} has a host_path; this sandbox shows a path under its "
                "own name"
            )

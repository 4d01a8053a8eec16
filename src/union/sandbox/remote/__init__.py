"""Sessions on a server: the same API, with commands run by ``sandbox-server``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from union.sandbox._core.optional_deps import require
from union.sandbox._core.resolve import resolve_session, validate_timeout
from union.sandbox._session.lifecycle import SingleUseLifecycle
from union.sandbox._session.session import Session
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal, Never

    from union.sandbox._core.literals import BackendName, NetworkMode, Persist, Shell
    from union.sandbox._core.resources import AnyResources

__all__ = ["attach", "session"]

_BACKENDS = ("default", "bubblewrap", "userns", "landlock", "sandbox-exec", "none")


def session(
    *,
    endpoint: str,
    token: str | None = None,
    cert: str | None = None,
    backend: BackendName | Literal["default"] = "default",
    host_work_dir: str | os.PathLike[str] | None = None,
    work_dir_name: str | None = None,
    network_mode: NetworkMode | None = None,
    network_allowlist: Sequence[str] | None = None,
    network_denylist: Sequence[str] | None = None,
    network_proxy_url: str | None = None,
    network_socks_url: str | None = None,
    timeout_s: float | None = None,
    env: Mapping[str, str] | None = None,
    read_only_paths: Sequence[str | os.PathLike[str]] = (),
    read_write_paths: Sequence[str | os.PathLike[str]] = (),
    resources: AnyResources | None = None,
    strict: bool = False,
    warm: bool | int = True,
    preload: Sequence[str] | None = (),
    persist: Persist = "workdir",
    shell: Shell | None = None,
    connect_timeout_s: float = 30.0,
    lazy: bool = True,
    **unknown: Never,
) -> Session:
    """Return a session on the server at ``endpoint``. Does no I/O.

    Args:
        endpoint: ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:///PATH``. With
            ``#sha256=...`` after an https URL, only the certificate with that fingerprint is
            accepted.
        token: The server's token, printable ASCII. Default: none is sent.
        cert: For an https endpoint: a fingerprint (``sha256:...``), or the path of a file with
            certificates to trust. Default: the system's trust store.
        backend: The isolation backend on the server. Default: ``"default"``, the server's choice.
        host_work_dir: A directory of the server's machine to use as the work dir. Default: a new
            one. The server may refuse any path.
        work_dir_name: The path under which commands see the work dir, such as ``"/workspace"``.
            Default: the server's choice. Not with ``"none"`` and ``"sandbox-exec"``.
        network_mode: ``"blocked"``, ``"allowlist"`` or ``"open"``: the default and the ceiling of
            every run. Default None: a run is blocked unless its call requests more, up to the
            limit of the server.
        network_allowlist: The hosts that ``"allowlist"`` allows. Default: none.
        network_denylist: Hosts that no run may reach. Default: none.
        network_proxy_url: An upstream HTTP proxy. The server refuses one that its operator has not
            named. Default: none.
        network_socks_url: An upstream SOCKS proxy, under the same rule. Default: none.
        timeout_s: Seconds after which the session ends. Default: no limit.
        env: Variables of every command. Default: none.
        read_only_paths: Paths of the server's machine to show read-only. Default: none.
        read_write_paths: Paths of the server's machine to show writable. Default: none.
        resources: Limits of every command, as ``Resources``. Default: those of the server.
        strict: True refuses to open where a layer would be weaker than usual. Default: False.
        warm: The number of sandboxes kept ready; 0 keeps none. Default True: a few.
        preload: Modules that are imported ahead for Python commands and contexts; once for the
            session if the server lists them (``--preload``), else inside each sandbox. Default:
            those of the server. With ``None`` each Python is started, with its own address layout.
        persist: ``"workdir"`` keeps the work dir and the venv between commands. ``"machine"`` also
            keeps ``/tmp``, ``/var/tmp``, ``/dev/shm`` and processes, until the session closes.
            Default: ``"workdir"``.
        shell: The shell of commands that are text, ``"bash"`` or ``"sh"``. Default: bash where the
            sandbox has it; see ``on_device.session()``.
        connect_timeout_s: Seconds to wait for the server. Default: 30.
        lazy: True connects at the first call, False when the session is opened. Default: True.
        **unknown: Not accepted; the error suggests the closest name.

    """
    if unknown:
        from union.sandbox._core.suggestions import unknown_argument

        raise unknown_argument(session, unknown)
    require("aiohttp", extra="remote", what="a remote session")
    from union.sandbox.remote._access import resolve_access

    if not isinstance(lazy, bool):
        raise SandboxUsageError(f"lazy must be True or False, not {lazy!r}", argument="lazy")
    access = resolve_access(
        endpoint,
        token=token,
        cert=cert,
        connect_timeout_s=validate_timeout("connect_timeout_s", connect_timeout_s),
        lazy=lazy,
    )
    spec = resolve_session(
        backend=backend,
        backends=_BACKENDS,
        host_work_dir=host_work_dir,
        work_dir_name=work_dir_name,
        network_mode=network_mode,
        network_allowlist=network_allowlist,
        network_denylist=network_denylist,
        network_proxy_url=network_proxy_url,
        network_socks_url=network_socks_url,
        timeout_s=timeout_s,
        env=env,
        read_only_paths=read_only_paths,
        read_write_paths=read_write_paths,
        resources=resources,
        strict=strict,
        warm=warm,
        preload=preload,
        persist=persist,
        shell=shell,
    )

    session_id = os.urandom(16).hex()

    def transport() -> RemoteTransport:
        from union.sandbox.remote._transport import RemoteTransport

        return RemoteTransport(spec, access, session_id)

    return Session(spec, SingleUseLifecycle(spec, transport), session_id)


def attach(
    session_id: str,
    *,
    endpoint: str,
    token: str | None = None,
    cert: str | None = None,
    connect_timeout_s: float = 30.0,
) -> Session:
    """Return a session that another client has opened on a server. Does no I/O.

    Opening it, or its first call, connects. Closing it ends only the commands that it has started;
    the session ends when its own client closes it.

    Args:
        session_id: ``Session.id`` of the session.
        endpoint: as for ``session()``.
        token: as for ``session()``. Default: none is sent.
        cert: as for ``session()``. Default: the system's trust store.
        connect_timeout_s: Seconds to wait for the server. Default: 30.

    """
    require("aiohttp", extra="remote", what="a remote session")
    from union.sandbox.remote._access import resolve_access

    if not isinstance(session_id, str) or not session_id.isalnum():
        raise SandboxUsageError(
            f"session_id must be the id of a session, not {session_id!r}", argument="session_id"
        )
    access = resolve_access(
        endpoint,
        token=token,
        cert=cert,
        connect_timeout_s=validate_timeout("connect_timeout_s", connect_timeout_s),
        lazy=True,
    )
    spec = resolve_session(backend="default", backends=_BACKENDS)

    async def locate() -> Access:
        return access

    def transport() -> RemoteTransport:
        from union.sandbox.remote._attached import AttachedTransport

        return AttachedTransport(spec, locate, session=session_id, ends_session=False)

    return Session(spec, SingleUseLifecycle(spec, transport), session_id)


if TYPE_CHECKING:
    from union.sandbox.remote._access import Access
    from union.sandbox.remote._transport import RemoteTransport

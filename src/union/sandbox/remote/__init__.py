"""Sessions on a server: the same session, run by ``sandbox-server`` on another machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._core.optional_deps import require
from union.sandbox._core.resolve import resolve_session, settled_timeout
from union.sandbox._session.session import Session
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import Literal, Never

    from union.sandbox._core.literals import BackendName, NetworkMode
    from union.sandbox._core.resources import AnyResources

__all__ = ["session"]

_BACKENDS = ("default", "bubblewrap", "userns", "sandbox-exec", "none")


def session(
    *,
    endpoint: str,
    token: str | None = None,
    cert: str | None = None,
    backend: BackendName | Literal["default"] = "default",
    host_work_dir: str | os.PathLike[str] | None = None,
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
    preload: Sequence[str] = (),
    connect_timeout_s: float = 30.0,
    lazy: bool = True,
    **unknown: Never,
) -> Session:
    """Describes a session on the server at ``endpoint``. Does no I/O.

    ``endpoint`` is ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:///PATH``; with
    ``#sha256=...`` behind an https one, only the certificate with that fingerprint is accepted.
    ``cert`` is such a fingerprint (``sha256:...``), or a file of certificates to trust. Paths are
    paths of the server's machine, and it may refuse them. ``network_mode`` and
    its lists are the default and the ceiling of every run; without ``network_mode`` a run is
    blocked unless its call asks for more, up to what the server allows. ``network_denylist``
    applies to every run. The server refuses an upstream proxy that its operator has not named.

    The server is reached at the first call, and waited for up to ``connect_timeout_s``; with
    ``lazy=False`` already when the session is opened.
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
        connect_timeout_s=settled_timeout("connect_timeout_s", connect_timeout_s),
        lazy=lazy,
    )
    spec = resolve_session(
        backend=backend,
        backends=_BACKENDS,
        host_work_dir=host_work_dir,
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
    )

    def transport() -> RemoteTransport:
        from union.sandbox.remote._transport import RemoteTransport

        return RemoteTransport(spec, access)

    return Session(spec, transport)


if TYPE_CHECKING:
    from union.sandbox.remote._transport import RemoteTransport

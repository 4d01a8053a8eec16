"""Sessions on a server: the same API, with commands run by ``sandbox-server``.

Written by scripts/sync_stubs.py from the asynchronous API; do not edit.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, Never

from union.sandbox._core.literals import BackendName, NetworkMode, Persist, Shell
from union.sandbox._core.resources import AnyResources
from union.sandbox.sync import Session

__all__ = ["attach", "session"]

def attach(
    session_id: str,
    *,
    endpoint: str,
    token: str | None = None,
    cert: str | None = None,
    connect_timeout_s: float = 30.0,
) -> Session:
    """Return a session that another client has opened on a server. Does no I/O."""
    ...

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
    read_only_paths: Sequence[str | os.PathLike[str]] = ...,
    read_write_paths: Sequence[str | os.PathLike[str]] = ...,
    resources: AnyResources | None = None,
    strict: bool = False,
    warm: bool | int = True,
    preload: Sequence[str] | None = ...,
    persist: Persist = "workdir",
    shell: Shell | None = None,
    connect_timeout_s: float = 30.0,
    lazy: bool = True,
    **unknown: Never,
) -> Session:
    """Return a session on the server at ``endpoint``. Does no I/O."""
    ...

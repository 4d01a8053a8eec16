"""Sessions on this machine: sandboxed child processes beside the calling program.

Written by scripts/sync_stubs.py from the asynchronous API; do not edit.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Never

from union.sandbox._core.literals import BackendName, NetworkMode, Persist, Shell
from union.sandbox._core.resources import AnyResources
from union.sandbox._policy.http_entries import Http
from union.sandbox.on_device._availability import BackendStatus
from union.sandbox.sync import Session

__all__ = ["attach", "available_backends", "default_fs_allowlist", "session"]

def attach(session_id: str) -> Session:
    """Return an open session of this process, for use in another event loop or thread."""
    ...

def available_backends() -> tuple[BackendStatus, ...]:
    """Try every backend; report ``name``, ``available``, ``reason`` and ``hint`` of each."""
    ...

def default_fs_allowlist() -> dict[str, tuple[str, ...]]:
    """Return the paths visible in every sandbox here, as ``read_only`` and ``read_write``."""
    ...

def session(
    *,
    backend: BackendName = ...,
    host_work_dir: str | os.PathLike[str] | None = None,
    work_dir_name: str | None = None,
    network_mode: NetworkMode | None = None,
    network_allowlist: Sequence[str | Http] | None = None,
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
    **unknown: Never,
) -> Session:
    """Describe a session; ``with`` or ``await ....open()`` opens it. Does no I/O."""
    ...

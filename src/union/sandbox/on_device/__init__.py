"""Sessions on this machine: sandboxed child processes beside the calling program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._backends import registry
from union.sandbox._core.resolve import resolve_session
from union.sandbox._session.session import Session

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import Never

    from union.sandbox._core.literals import BackendName, NetworkMode
    from union.sandbox._core.resources import AnyResources

__all__ = ["available_backends", "default_fs_allowlist", "session"]


def session(
    *,
    backend: BackendName = registry.DEFAULT,
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
    **unknown: Never,
) -> Session:
    r"""Describe a session; ``async with`` or ``await ....open()`` opens it. Does no I/O.

    >>> async def main():
    ...     async with session(backend="userns") as sbx:
    ...         return await sbx.run_code("print(2 + 2)")
    >>> import asyncio
    >>> asyncio.run(main())
    '4\n'

    Args:
        backend: ``"bubblewrap"`` (default), ``"userns"``, ``"sandbox-exec"`` or ``"none"``. It is
            used or refused, never replaced by another.
        host_work_dir: an existing directory to work in, which is kept. Default: a private
            directory, removed at close.
        network_mode: ``"blocked"``, ``"allowlist"`` or ``"open"``: the default and the ceiling of
            every call. Without it, a call is blocked unless it requests more.
        network_allowlist: hosts that may be reached; required by ``"allowlist"`` only.
        network_denylist: hosts that are refused, whatever else allows them. Default: none.
        network_proxy_url: an upstream HTTP proxy for allowed connections. Default: none.
        network_socks_url: an upstream SOCKS5 proxy for allowed connections. Default: none.
        timeout_s: time limit of the session in seconds. Default: no limit.
        env: environment variables of every command. Default: none.
        read_only_paths: further host paths that commands may read. Default: none.
        read_write_paths: further host paths that commands may change. Default: none.
        resources: limits of each sandbox, as ``Resources`` or a mapping. Default: no limit on
            memory and CPU.
        strict: refuse to open where a layer would be weaker than usual (see
            ``Session.isolation``). Default: False.
        warm: number of sandboxes kept ready, so that a command starts at once. True (default)
            keeps a few, 0 or False none.
        preload: modules that a waiting Python imports ahead, inside its sandbox. Default: none.
        **unknown: none is accepted; the error suggests the nearest argument.

    """
    if unknown:
        from union.sandbox._core.suggestions import unknown_argument

        raise unknown_argument(session, unknown)
    spec = resolve_session(
        backend=backend,
        backends=registry.NAMES,
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

    def transport() -> LocalTransport:
        from union.sandbox.on_device._transport import LocalTransport

        if spec.backend == "none":
            _warn_that_nothing_is_isolated()
        return LocalTransport(spec)

    return Session(spec, transport)


def _warn_that_nothing_is_isolated() -> None:
    """Warn at the caller's line on every call; a plain warning is shown once per line."""
    import sys
    import warnings

    frame = sys._getframe()  # noqa: SLF001 - as warnings itself does
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("union.sandbox"):
        frame = frame.f_back
    warnings.warn_explicit(
        "backend='none' isolates nothing: commands run with all of this process's rights",
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )


def available_backends() -> tuple[BackendStatus, ...]:
    """Try every backend; report ``name``, ``available``, ``reason`` and ``hint`` of each.

    >>> [status.name for status in available_backends()]
    ['bubblewrap', 'userns', 'sandbox-exec', 'none']
    """
    from union.sandbox.on_device import _availability

    return _availability.available_backends()


def default_fs_allowlist() -> dict[str, tuple[str, ...]]:
    """Return the paths visible in every sandbox here, as ``read_only`` and ``read_write``."""
    from union.sandbox._linux import host

    binds, links = host.system_view()
    read_only = [s.path for s in binds] + [path for path, _ in links]
    return {
        "read_only": tuple(sorted({*read_only, *host.interpreter().paths})),
        "read_write": ("/dev/shm", "/tmp"),  # noqa: S108 - names inside the sandbox
    }


if TYPE_CHECKING:
    from union.sandbox.on_device._availability import BackendStatus
    from union.sandbox.on_device._transport import LocalTransport

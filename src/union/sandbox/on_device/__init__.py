"""Sessions on this machine: sandboxed child processes beside the calling program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from union.sandbox._backends import registry
from union.sandbox._core.resolve import resolve_session
from union.sandbox._session.lifecycle import SingleUseLifecycle
from union.sandbox._session.session import Session

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from typing import Never

    from union.sandbox._core.literals import BackendName, NetworkMode, Persist, Shell
    from union.sandbox._core.resources import AnyResources
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._policy.http_entries import Http

__all__ = ["attach", "available_backends", "default_fs_allowlist", "session"]


def session(
    *,
    backend: BackendName = registry.DEFAULT,
    host_work_dir: str | os.PathLike[str] | None = None,
    work_dir_name: str | None = None,
    network_mode: NetworkMode | None = None,
    network_allowlist: Sequence[str | Http] | None = None,
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
        backend: ``"bubblewrap"`` (default), ``"userns"``, ``"landlock"`` (weaker, for containers
            that refuse namespaces), ``"sandbox-exec"`` or ``"none"``. It is used or refused, never
            replaced by another.
        host_work_dir: an existing directory to work in, which is kept. Default: a private
            directory, removed at close.
        work_dir_name: the path under which commands see the work dir, such as ``"/workspace"``.
            Default: its path on this machine. Not with ``"landlock"``, ``"none"`` and
            ``"sandbox-exec"``.
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
        preload: modules of this Python that are imported once, ahead, for all Python commands and
            contexts of the session, which are then forked from that process. Default: none. With
            ``None`` nothing is forked: each Python is started, with its own address layout.
        persist: ``"workdir"`` (default) keeps the work dir and the venv between commands.
            ``"machine"`` also keeps ``/tmp``, ``/var/tmp``, ``/dev/shm`` and processes, until the
            session closes. Only with ``"bubblewrap"`` and ``"userns"``.
        shell: the shell of commands that are text, ``"bash"`` or ``"sh"``. Default: bash where
            the sandbox has it, except for a program with plain arguments, which runs the same in
            ``/bin/sh`` and starts sooner there. ``Session.shell`` is its path.
        **unknown: none is accepted; the error suggests the nearest argument.

    """
    if unknown:
        from union.sandbox._core.suggestions import unknown_argument

        raise unknown_argument(session, unknown)
    spec = resolve_session(
        backend=backend,
        backends=registry.NAMES,
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
    return session_of(spec)


def session_of(spec: SessionSpec, *, warn: bool = True) -> Session:
    """Return a session of resolved arguments; ``warn`` about a backend that isolates less."""

    def transport() -> LocalTransport:
        from union.sandbox.on_device._transport import LocalTransport

        if spec.backend == "none" and warn:
            _warn_that_nothing_is_isolated()
        elif spec.backend == "landlock" and warn:
            _warn_that_less_is_isolated()
        return LocalTransport(spec)

    return Session(spec, SingleUseLifecycle(spec, transport))


def attach(session_id: str) -> Session:
    """Return an open session of this process, for use in another event loop or thread.

    It is the same session: closing it closes it for all. It ends with the event loop that opened
    it.

    Args:
        session_id: ``Session.id`` of the session.

    Raises:
        SessionClosedError: no session with that id is open in this process.

    """
    from union.sandbox._session import registry as sessions

    return sessions.find(session_id)


def _warn_that_nothing_is_isolated() -> None:
    _warn("backend='none' isolates nothing: commands run with all of this process's rights")


_has_warned = False


def _warn(message: str) -> None:
    """Warn at the caller's line on every call; a plain warning is shown once per line."""
    import sys
    import warnings

    frame = sys._getframe()  # noqa: SLF001 - as warnings itself does
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("union.sandbox"):
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        UserWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )


def _warn_that_less_is_isolated() -> None:
    """Warn once per process."""
    global _has_warned  # noqa: PLW0603 - once per process
    if not _has_warned:
        _has_warned = True
        _warn(
            "backend='landlock' isolates less than 'userns': no namespaces, no private root, /proc "
            "or /tmp; names, sizes and times of files outside can be read (see SECURITY.md)"
        )


def available_backends() -> tuple[BackendStatus, ...]:
    """Try every backend; report ``name``, ``available``, ``reason`` and ``hint`` of each.

    >>> [status.name for status in available_backends()]
    ['bubblewrap', 'userns', 'landlock', 'sandbox-exec', 'none']
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

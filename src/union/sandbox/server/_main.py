"""The process of a server: its start, its shutdown, its listening sockets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import signal
import socket
import stat
import sys
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.owned_dir import OwnedDir
from union.sandbox._net.own_server import OwnServer
from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import WINDOW
from union.sandbox.errors import SandboxError, SandboxUsageError
from union.sandbox.on_device._workdir import sweep_in_background
from union.sandbox.server._allocator import retain_freed_memory
from union.sandbox.server._auth import Authority
from union.sandbox.server._config import TOKEN_VARIABLE, config_from_arguments
from union.sandbox.server._connections import raise_file_limit
from union.sandbox.server._listener import HttpListener, import_http
from union.sandbox.server._logs import set_up_logging
from union.sandbox.server._mcp import serving_mcp
from union.sandbox.server._metrics import Metrics
from union.sandbox.server._network_policy import own_address_entries
from union.sandbox.server._owner_socket import OwnerSocket
from union.sandbox.server._sessions import Sessions, prepare_work_dir
from union.sandbox.server._supervised import (
    OwnerLease,
    SupervisorWatch,
    apply_launch_spec,
    read_launch_spec,
)
from union.sandbox.server._tls import server_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from union.sandbox.server._config import Bind, Config

__all__ = ["main", "serve"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_STDIN: Final = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command ``sandbox-server``; return 0 after an orderly end, 2 for a usage error."""
    try:
        config = config_from_arguments(argv, os.environ)
        os.environ.pop(TOKEN_VARIABLE, None)
        if config.supervised:
            config = apply_launch_spec(config, read_launch_spec(_STDIN))
        if config.owner_socket is None:
            import_http()
        gc.freeze()  # Imported objects are never garbage.
        gc.enable()
        set_up_logging(config.log_level, _token_filter(config))
        raise_file_limit()
        _disable_core_files()
        # Buffers of a few streams are allocated and freed all the time.
        retain_freed_memory(2 * WINDOW)
        asyncio.run(serve(config))
    except SandboxError as exc:
        if "--supervised" in (sys.argv if argv is None else argv):
            print(json.dumps({"failed": encode_error(exc)}), flush=True)  # noqa: T201 - to the supervisor
        sys.stderr.write(f"sandbox-server: {exc}\n")
        return 2
    return 0


def _disable_core_files() -> None:
    """Leave no core file after a crash: the memory of a server holds secrets of its clients."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _token_filter(config: Config) -> Callable[[str], bool]:
    """Return a function that recognises the tokens of this server, to keep them out of logs."""
    known = [] if config.verifier is None else [config.verifier]
    if config.guest is not None:
        known.append(config.guest.verifier)
    if config.scraper is not None:
        known.append(config.scraper)
    return lambda text: any(verifier.accepts(text) for verifier in known)


async def serve(config: Config) -> None:
    """Serve until SIGTERM, SIGINT or a shutdown request; return when all sessions are closed."""
    prepare_work_dir(config.work_dir)
    sweep_in_background(config.work_dir)
    context, fingerprint = server_context(config)
    metrics = Metrics()
    sessions = Sessions(config, metrics)
    authority = Authority(config.verifier, config.guest, config.scraper)
    shutdown = _Shutdown(sessions, config)
    sockets = [_listen(bind) for bind in config.binds]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shutdown.begin)
    listening = [s.getsockname()[:2] for s in sockets if s.family != socket.AF_UNIX]
    sessions.own_server = OwnServer(listening)
    sessions.own_entries = own_address_entries(listening)
    listener = HttpListener(
        config, sessions, authority, sockets=sockets, context=context, shut_down=shutdown.begin
    )
    if config.owner_socket is None:
        await listener.open()
    else:
        listener.open_on_demand()
    launch, watch, home, owner_socket, lease = config.launch, None, None, None, None
    try:
        if launch is not None:
            watch = SupervisorWatch(_STDIN, shutdown.done.set)
            # Locked until the end, so that the sweep of another process does not remove it.
            home = OwnedDir.join(launch.home) if launch.home is not None else None
            sessions.on_supervised_end = shutdown.done.set
            if launch.owner_lease is not None:
                lease = OwnerLease(launch.owner_lease, authority, shutdown.begin)
            await sessions.open_supervised(launch)
        if config.owner_socket is not None:
            owner_socket = OwnerSocket(config.owner_socket, sessions, authority)
        async with serving_mcp(config, sockets, fingerprint, shutdown.begin) as mcp_url:
            _announce(config, sockets, fingerprint, mcp_url=mcp_url)
            await shutdown.done.wait()
    finally:
        await listener.close()
        await sessions.close_all()
        if owner_socket is not None:
            await owner_socket.end()
        await listener.shut_down_connections()
        for bind in config.binds:
            if bind.path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(bind.path)
        for timer in (watch, lease):
            if timer is not None:
                timer.close()
        if home is not None:
            home.remove_if_empty()  # The sessions have removed their work dirs in it.
    _LOGGER.info("stopped")


class _Shutdown:
    """Shuts the server down: the first request drains it, the second one ends it at once."""

    def __init__(self, sessions: Sessions, config: Config) -> None:
        self.done = asyncio.Event()
        self._sessions = sessions
        self._config = config
        self._draining: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._draining is not None:
            self.done.set()
            return
        launch = self._config.launch
        if launch is not None and time.time() >= launch.expires:
            # The supervisor's timer fired before the session's own: the reason is the timeout.
            self._sessions.expire_all()
        _LOGGER.info("draining", extra={"runs": len(self._sessions.running)})
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        await self._sessions.drain(self._config.drain_s)
        self.done.set()


def _listen(bind: Bind) -> socket.socket:
    try:
        if bind.path:
            return _listen_unix(bind.path)
        family, kind, protocol, _, address = socket.getaddrinfo(
            bind.host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except OSError as exc:
        raise SandboxUsageError(f"--bind {bind}: {exc.strerror or exc}", argument="--bind") from exc
    return sock


def _listen_unix(path: str) -> socket.socket:
    """Bind a socket that only this user can use; replace one that a dead server left, if any."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not _accepts_connections(path):
            os.unlink(path)
    sock = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        sock.bind(path)
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock


def _accepts_connections(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _reachable(host: str) -> str:
    """Return the address of this machine that others can use, for a socket bound to all."""
    if host not in {"0.0.0.0", "::"}:  # noqa: S104 - the socket is open already
        return host
    # Connecting a datagram socket sends nothing; it selects the address of the default route.
    for family, anywhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        if family == socket.AF_INET6 and host != "::":
            continue
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((anywhere, 9))
            return str(probe.getsockname()[0])
    return host


def _announce(
    config: Config,
    sockets: list[socket.socket],
    fingerprint: str | None,
    *,
    mcp_url: str | None = None,
) -> None:
    """Log the endpoints, and write them to stdout as one line for the starting process."""
    endpoints = []
    for sock in sockets:
        if sock.family == socket.AF_UNIX:
            endpoints.append(f"unix://{sock.getsockname()}")
            continue
        host, port = sock.getsockname()[:2]
        host = _reachable(host)
        shown = f"[{host}]" if ":" in host else host
        pin = f"#{fingerprint.replace(':', '=')}" if config.tls_self_signed and fingerprint else ""
        endpoints.append(f"{'https' if config.is_tls else 'http'}://{shown}:{port}{pin}")
    _LOGGER.info("listening", extra={"endpoints": endpoints, "token": config.verifier is not None})
    if config.verifier is not None and not config.is_tls:
        for bind in config.binds:
            if not bind.is_local:
                _LOGGER.warning(
                    "tokens are sent unencrypted: use --tls-self-signed or --tls-cert",
                    extra={"bind": str(bind)},
                )
    ready = {"ready": endpoints, "pid": os.getpid()}
    if mcp_url is not None:
        _LOGGER.info("serving MCP", extra={"url": mcp_url})
        if config.mcp is not None and not config.mcp.is_local and config.tls_cert is None:
            _LOGGER.warning(
                "tokens of MCP clients are sent unencrypted: use --tls-cert",
                extra={"bind": str(config.mcp)},
            )
        ready["mcp"] = mcp_url
    print(json.dumps(ready), flush=True)  # noqa: T201 - for the starting process

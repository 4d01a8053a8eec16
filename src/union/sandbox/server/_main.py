"""The process: listens, serves, drains, ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
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
from union.sandbox.server._addresses import own_entries
from union.sandbox.server._allocator import keep_freed
from union.sandbox.server._auth import Authority
from union.sandbox.server._config import TOKEN_VARIABLE, config_from_arguments
from union.sandbox.server._connections import raise_file_limit
from union.sandbox.server._front import Front, load
from union.sandbox.server._line import OwnerLine
from union.sandbox.server._logs import set_up
from union.sandbox.server._metrics import Metrics
from union.sandbox.server._sessions import Sessions, prepare_work_dir
from union.sandbox.server._supervised import (
    Lifeline,
    OwnerLease,
    read_orders,
    with_orders,
)
from union.sandbox.server._tls import server_context

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from union.sandbox.server._config import Bind, Config

__all__ = ["main", "serve"]

_LOGGER: Final = logging.getLogger("union.sandbox.server")
_STDIN: Final = 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``sandbox-server``: 0 after an orderly end, 2 for a mistake in its arguments."""
    try:
        config = config_from_arguments(argv, os.environ)
        os.environ.pop(TOKEN_VARIABLE, None)
        if config.supervised:
            config = with_orders(config, read_orders(_STDIN))
        if config.line is None:
            load()
        gc.freeze()  # nor later
        gc.enable()
        set_up(config.log_level, _token_of(config))
        raise_file_limit()
        # Output of a few streams comes and goes all the time.
        keep_freed(2 * WINDOW)
        asyncio.run(serve(config))
    except SandboxError as exc:
        if "--supervised" in (sys.argv if argv is None else argv):
            print(json.dumps({"failed": encode_error(exc)}), flush=True)  # noqa: T201 - to the starter
        sys.stderr.write(f"sandbox-server: {exc}\n")
        return 2
    return 0


def _token_of(config: Config) -> Callable[[str], bool]:
    """Recognise the tokens of this server in text, for logs."""
    known = [] if config.verifier is None else [config.verifier]
    if config.guest is not None:
        known.append(config.guest.verifier)
    return lambda text: any(verifier.accepts(text) for verifier in known)


async def serve(config: Config) -> None:
    """Serves until SIGTERM, SIGINT or a request to shut down; returns when everything is gone."""
    prepare_work_dir(config.work_dir)
    sweep_in_background(config.work_dir)
    context, fingerprint = server_context(config)
    metrics = Metrics()
    sessions = Sessions(config, metrics)
    authority = Authority(config.verifier, config.guest)
    stopping = _Stopping(sessions, config)
    sockets = [_listen(bind) for bind in config.binds]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.begin)
    listening = [s.getsockname()[:2] for s in sockets if s.family != socket.AF_UNIX]
    sessions.own_server = OwnServer(listening)
    sessions.own_entries = own_entries(listening)
    front = Front(
        config, sessions, authority, sockets=sockets, context=context, shut_down=stopping.begin
    )
    if config.line is None:
        await front.open()
    else:
        front.open_when_asked()
    fixed, lifeline, home, line, lease = config.fixed, None, None, None, None
    try:
        if fixed is not None:
            lifeline = Lifeline(_STDIN, stopping.done.set)
            # Held until the end: a sweep of another process must not remove it before.
            home = OwnedDir.join(fixed.home) if fixed.home is not None else None
            sessions.over = stopping.done.set
            if fixed.owner_lease is not None:
                lease = OwnerLease(fixed.owner_lease, authority, stopping.begin)
            await sessions.open_fixed(fixed)
        if config.line is not None:
            line = OwnerLine(config.line, sessions, authority)
        _announce(config, sockets, fingerprint)
        await stopping.done.wait()
    finally:
        await front.close()
        await sessions.close_all()
        if line is not None:
            await line.end()
        await front.shutdown()
        for bind in config.binds:
            if bind.path:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(bind.path)
        for watch in (lifeline, lease):
            if watch is not None:
                watch.close()
        if home is not None:
            home.remove_if_empty()  # the sessions have removed their work dirs in it
    _LOGGER.info("ended")


class _Stopping:
    """The way down: asked once, it drains; asked again, it does not wait any more."""

    def __init__(self, sessions: Sessions, config: Config) -> None:
        self.done = asyncio.Event()
        self._sessions = sessions
        self._config = config
        self._draining: asyncio.Task[None] | None = None

    def begin(self) -> None:
        if self._draining is not None:
            self.done.set()
            return
        fixed = self._config.fixed
        if fixed is not None and time.time() >= fixed.expires:
            # Its supervisor was quicker than its own clock: the reason is the same.
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
    """For this user alone. A socket that a dead server left is replaced, anything else is not."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not _answers(path):
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


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _announce(config: Config, sockets: list[socket.socket], fingerprint: str | None) -> None:
    """One line on stdout, for whoever started this: where it listens, and what to pin."""
    endpoints = []
    for sock in sockets:
        if sock.family == socket.AF_UNIX:
            endpoints.append(f"unix://{sock.getsockname()}")
            continue
        host, port = sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        pin = f"#{fingerprint.replace(':', '=')}" if config.tls_self_signed and fingerprint else ""
        endpoints.append(f"{'https' if config.is_tls else 'http'}://{shown}:{port}{pin}")
    _LOGGER.info("listening", extra={"endpoints": endpoints, "token": config.verifier is not None})
    if config.verifier is not None and not config.is_tls:
        for bind in config.binds:
            if not bind.is_local:
                _LOGGER.warning(
                    "the token travels in the clear; use --tls-self-signed or --tls-cert",
                    extra={"bind": str(bind)},
                )
    print(json.dumps({"ready": endpoints, "pid": os.getpid()}), flush=True)  # noqa: T201

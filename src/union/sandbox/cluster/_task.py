"""The body of the task ``sandbox_server``: runs in the pod, around the server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import tempfile
import time
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final

from union.sandbox._wire.errors import encode_error
from union.sandbox._wire.frames import VERSION
from union.sandbox.cluster._announce import Announcement, announce
from union.sandbox.cluster._launch_spec import WORK_DIR, Orders
from union.sandbox.cluster._request import BACKENDS, MOST_S, OWNER_LEASE
from union.sandbox.cluster._supervisor import Supervisor
from union.sandbox.errors import SandboxError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["serve_run"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_ADDRESS: Final = "POD_IP"
_MOST_SESSION: Final = 4 * 1024 * 1024


def _bind() -> str:
    """Where to listen: at the pod's address, or without one at this machine's own."""
    from union.sandbox.cluster._pod import PORT

    told = os.environ.get(_ADDRESS, "")
    if not told:
        return "127.0.0.1:0"
    address = ip_address(told)
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}:{0 if address.is_loopback else PORT}"


def _session(text: str, forwarded: Sequence[str]) -> dict[str, Any]:
    """What the server is told of the session, with what the environment gives to its sandboxes."""
    if len(text) > _MOST_SESSION or not isinstance(told := json.loads(text), dict):
        raise SandboxUsageError("the description of the session cannot be read")
    env = {name: os.environ[name] for name in forwarded if name in os.environ}
    if env:
        told["env"] = {**env, **(told.get("env") or {})}
    return told


def _paths(told: dict[str, Any]) -> tuple[str, ...]:
    """The paths of the pod that the session uses; the server checks what they are."""
    named = (*(told.get("read_only_paths") or ()), *(told.get("read_write_paths") or ()))
    return tuple(str(path) for path in (told.get("host_work_dir"), *named) if path)


async def serve_run(
    *,
    owner_sha256: str,
    guest_sha256: str,
    timeout_s: float,
    session: str,
    sandbox_mode: str,
    announce_to: str,
    announce_key: str,
    forwarded: Sequence[str],
) -> str:
    """Serves the one session of this run until its time is over, or nobody wants it any more."""
    import flyte

    context = flyte.ctx()
    run = str(context.action.run_name)
    now = time.time()
    # A pod that the platform makes again goes on with the time of the first, not with its own.
    started = context.run_start_time
    begun = now if started is None else min(now, started.timestamp())
    expires = begun + min(timeout_s, MOST_S)
    if expires <= now:
        _LOGGER.warning("the session's time was over before its server could start")
        return "timeout"
    told = _session(session, forwarded)
    orders = Orders(
        run=run,
        owner_sha256=owner_sha256,
        guest_sha256=guest_sha256,
        expires=expires,
        backend=BACKENDS[sandbox_mode],
        owner_lease=told.pop(OWNER_LEASE, None),
        told=told,
        bind=_bind(),
        # Its clients know it by its certificate, and send their tokens to no other server.
        tls=True,
        # The same place, unless the environment has its scratch elsewhere.
        work_dir=os.path.join(tempfile.gettempdir(), os.path.basename(WORK_DIR)),
        shown_at=None if told.get("host_work_dir") else WORK_DIR,
        allow_paths=_paths(told),
    )
    supervisor = Supervisor(orders, keeps_log=False)
    loop = asyncio.get_running_loop()
    try:
        # A pod's first process is not ended by SIGTERM unless it asks for it.
        loop.add_signal_handler(signal.SIGTERM, supervisor.stop)
    except (RuntimeError, ValueError) as exc:
        _LOGGER.warning("SIGTERM cannot be handled here: %s", exc)
    running = loop.create_task(supervisor.run())
    try:
        await _announce(supervisor, run, announce_key, expires, announce_to)
        return await running
    except BaseException as exc:
        was_stopped = supervisor.is_stopped
        supervisor.stop()
        await asyncio.wait({running})
        if isinstance(exc, SandboxError) and was_stopped:
            return "stopped"
        if isinstance(exc, SandboxError) and time.time() >= expires:
            return "timeout"  # it was too late to become ready, which is no failure
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _announce(
    supervisor: Supervisor, run: str, key: str, expires: float, announce_to: str
) -> None:
    """Says where the server is, or why there is none, to whoever can tell that it is true."""
    failure: SandboxError | None = None
    try:
        endpoint = await supervisor.ready
        told = Announcement(run=run, endpoint=endpoint, protocol=VERSION, expires=expires)
    except SandboxError as exc:
        failure = exc
        told = Announcement(run=run, protocol=VERSION, expires=expires, failed=encode_error(exc))
    line = announce(told, key=key)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if announce_to:
        try:
            from flyte import storage

            await storage.put_stream(line.encode(), to_path=announce_to)
        except Exception as exc:  # noqa: BLE001 - any store, any error: the log has said it already
            _LOGGER.warning("the announcement could not be stored: %s", exc)
    if failure is not None:
        raise failure

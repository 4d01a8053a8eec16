"""The body of the task ``sandbox_server``: runs in the pod and supervises the server."""

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
from union.sandbox._wire.launch import LaunchSpec
from union.sandbox.cluster._announce import Announcement, announce
from union.sandbox.cluster._credentials import read_credentials
from union.sandbox.cluster._keys import session_name
from union.sandbox.cluster._pod_memory import within_pod
from union.sandbox.cluster._request import ATTACH_SALT, BACKENDS, MAX_TIMEOUT_S, OWNER_LEASE
from union.sandbox.cluster._server_command import WORK_DIR, ServerCommand
from union.sandbox.cluster._supervisor import Supervisor
from union.sandbox.errors import SandboxError, SandboxExecutionError, SandboxUsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["serve_run"]

_LOGGER: Final = logging.getLogger("union.sandbox.cluster")
_ADDRESS: Final = "POD_IP"
_MAX_SESSION: Final = 4 * 1024 * 1024


def _bind() -> str:
    """Return the address to listen at: the pod's, or loopback outside a pod."""
    from union.sandbox.cluster._pod import PORT

    pod_ip = os.environ.get(_ADDRESS, "")
    if not pod_ip:
        return "127.0.0.1:0"
    address = ip_address(pod_ip)
    shown = f"[{address}]" if address.version == 6 else str(address)
    return f"{shown}:{0 if address.is_loopback else PORT}"


def _scratch() -> str:
    """Return the directory for the work dir: TMPDIR, or /tmp."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as exc:
        raise SandboxExecutionError(
            "the pod has no writable directory for the work dir: neither TMPDIR nor /tmp is "
            "writable",
            code="no-scratch",
            hint="where the root file system is read-only, mount an emptyDir at /tmp, or set "
            "TMPDIR in env_vars of the environment to a writable directory",
        ) from exc


def _session(text: str, forwarded: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of the session, with the variables that the environment forwards."""
    if len(text) > _MAX_SESSION or not isinstance(arguments := json.loads(text), dict):
        raise SandboxUsageError(
            f"session must be a JSON object of at most {_MAX_SESSION} characters, got {len(text)}",
            argument="session",
        )
    env = {name: os.environ[name] for name in forwarded if name in os.environ}
    if env:
        arguments["env"] = {**env, **(arguments.get("env") or {})}
    return arguments


def _paths(arguments: dict[str, Any]) -> tuple[str, ...]:
    """Return the paths of the pod that the session uses; the server checks them."""
    named = (*(arguments.get("read_only_paths") or ()), *(arguments.get("read_write_paths") or ()))
    return tuple(str(path) for path in (arguments.get("host_work_dir"), *named) if path)


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
    credentials: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Serve the only session of this run until it expires or is closed."""
    import flyte

    context = flyte.ctx()
    run = str(context.action.run_name)
    now = time.time()
    # A pod that the platform restarts keeps the start time of the first one.
    started = context.run_start_time
    begun = now if started is None else min(now, started.timestamp())
    expires = begun + min(timeout_s, MAX_TIMEOUT_S)
    if expires <= now:
        _LOGGER.warning("the session's timeout has passed before its server could start")
        return "timeout"
    arguments = _session(session, forwarded)
    lease = arguments.pop(OWNER_LEASE, None)
    arguments.pop(ATTACH_SALT, None)  # For owners alone.
    try:
        arguments = within_pod(arguments)
        scratch = _scratch()
        stored = read_credentials(credentials or {})
    except SandboxError as exc:
        await _publish(_failure(exc, run, expires), announce_key, announce_to)
        raise
    spec = LaunchSpec(
        session=session_name(run),
        owner_lease=lease,
        session_arguments=arguments,
        owner_sha256=owner_sha256,
        guest_sha256=guest_sha256,
        expires=expires,
        shown_at=None if arguments.get("host_work_dir") else WORK_DIR,
        secrets=stored or None,
    )
    command = ServerCommand(
        backend=BACKENDS[sandbox_mode],
        bind=_bind(),
        expires=expires,
        make_launch_spec=lambda: spec,
        # Clients pin its certificate, and send their tokens to no other server.
        tls=True,
        work_dir=os.path.join(scratch, os.path.basename(WORK_DIR)),
        allow_paths=_paths(arguments),
    )
    supervisor = Supervisor(command, keeps_log=False)
    loop = asyncio.get_running_loop()
    try:
        # SIGTERM does not end the first process of a pod unless it has a handler.
        loop.add_signal_handler(signal.SIGTERM, supervisor.stop)
    except (RuntimeError, ValueError) as exc:
        _LOGGER.warning("SIGTERM cannot be handled here: %s", exc)
    running = loop.create_task(supervisor.run())
    try:
        await _announce(supervisor, run, announce_key, expires, announce_to)
        return await running
    except BaseException as exc:
        # Also when the task is cancelled: the server must not outlive it.
        was_stopped = supervisor.is_stopped
        supervisor.stop()
        await asyncio.wait({running})
        if isinstance(exc, SandboxError) and was_stopped:
            return "stopped"
        if isinstance(exc, SandboxError) and time.time() >= expires:
            return "timeout"  # The expiry came before it was ready, which is no failure.
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _announce(
    supervisor: Supervisor, run: str, key: str, expires: float, announce_to: str
) -> None:
    """Publish the signed address of the server, or why there is none."""
    failure: SandboxError | None = None
    try:
        endpoint = await supervisor.ready
        found = Announcement(run=run, endpoint=endpoint, protocol=VERSION, expires=expires)
    except SandboxError as exc:
        failure = exc
        found = _failure(exc, run, expires)
    await _publish(found, key, announce_to)
    if failure is not None:
        raise failure


def _failure(exc: SandboxError, run: str, expires: float) -> Announcement:
    return Announcement(run=run, protocol=VERSION, expires=expires, failed=encode_error(exc))


async def _publish(found: Announcement, key: str, announce_to: str) -> None:
    line = announce(found, key=key)
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
    if announce_to:
        try:
            from flyte import storage

            await storage.put_stream(line.encode(), to_path=announce_to)
        except Exception as exc:  # noqa: BLE001 - any error of any store: the log has the line
            _LOGGER.warning("the announcement could not be stored: %s", exc)

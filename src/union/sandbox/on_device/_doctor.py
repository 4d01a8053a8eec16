"""``doctor``: try every backend and layer, attack those that work, and report remedies."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from union.sandbox._backends import registry
from union.sandbox._core.diagnosis import Attack, BackendReport, DoctorReport
from union.sandbox._core.spec import SessionSpec
from union.sandbox._linux import kernel
from union.sandbox._system import IS_LINUX
from union.sandbox._version import __version__
from union.sandbox.on_device import _escape_probe, session_of
from union.sandbox.on_device._availability import in_own_loop, try_backend
from union.sandbox.on_device._layers import probe_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.literals import BackendName

__all__ = ["doctor"]

_TIMEOUT_S: Final = 30.0


def doctor() -> DoctorReport:
    """Try every backend and every layer below them on this machine.

    Open a small sandbox of each backend that works and attack it from inside. The report names the
    cause and the remedy of each failure. Takes about a second; works with or without a running
    event loop, which is blocked meanwhile.

    >>> report = doctor()
    >>> [backend.name for backend in report.backends]
    ['bubblewrap', 'userns', 'landlock', 'sandbox-exec', 'none']
    """
    return in_own_loop(_examine())


async def _examine() -> DoctorReport:
    return DoctorReport(
        version=__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        uid=os.geteuid(),
        default=registry.DEFAULT,
        backends=tuple([await _backend(name) for name in registry.NAMES]),
        layers=await probe_layers(),
    )


async def _backend(name: BackendName) -> BackendReport:
    status = await try_backend(name)
    if not status.available or name == "none":
        return BackendReport(
            name=name, available=status.available, reason=status.reason, hint=status.hint
        )
    async with session_of(SessionSpec(backend=name, warm=1), warn=False) as sbx:
        with _targets(os.path.dirname(sbx.work_dir)) as targets:
            result = await sbx.exec(
                _program(),
                script_type="python",
                env={_escape_probe.TARGETS: json.dumps(targets)},
                timeout_s=_TIMEOUT_S,
                check=True,
            )
        found = json.loads(result.stdout)
        attacks = tuple(
            Attack(
                name=key,
                tried=tried,
                outcome=_outcome(key, sbx.isolation, through=found[key]["through"]),
                detail=found[key]["detail"],
            )
            for key, (tried, _) in _escape_probe.ATTEMPTS.items()
            if key in found
        )
        return BackendReport(name=name, available=True, isolation=sbx.isolation, attacks=attacks)


def _program() -> str:
    return Path(_escape_probe.__file__).read_text(encoding="utf-8")


def _outcome(
    name: str, isolation: Isolation, *, through: bool
) -> Literal["held", "weaker", "failed"]:
    if not through:
        return "held"
    # With the container's own /proc its processes are listed, as the isolation report shows.
    return "weaker" if name == "processes" and isolation.proc == "inherited" else "failed"


def _attempts() -> list[str]:
    if not IS_LINUX:
        return list(_escape_probe.PORTABLE)
    return [name for name in _escape_probe.ATTEMPTS if name != "signals"]


@contextlib.contextmanager
def _targets(directory: str) -> Iterator[dict[str, Any]]:
    """Create a file, sockets and a listener on the host that a sandbox must not reach."""
    own = tempfile.mkdtemp(prefix=f"sandbox-{os.getpid()}-targets-", dir=directory)
    token = secrets.token_hex(8)
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as tcp,
            socket.socket(socket.AF_UNIX) as by_path,
            socket.socket(socket.AF_UNIX) as abstract,
        ):
            by_path.bind(f"{own}/socket")
            if IS_LINUX:
                abstract.bind(f"\0sandbox-doctor-{token}")
                abstract.listen()
            by_path.listen()
            Path(own, "secret").write_text(token, encoding="ascii")
            # World-readable, so that only the sandbox prevents access.
            for path, mode in ((own, 0o755), (f"{own}/secret", 0o644), (f"{own}/socket", 0o666)):
                os.chmod(path, mode)
            yield {
                "pid": os.getpid(),
                "started": kernel.start_time(os.getpid()) if IS_LINUX else 0,
                "port": tcp.getsockname()[1],
                "path_socket": f"{own}/socket",
                "abstract_socket": f"sandbox-doctor-{token}" if IS_LINUX else "",
                "attempts": _attempts(),
                "secret": f"{own}/secret",
            }
    finally:
        shutil.rmtree(own)

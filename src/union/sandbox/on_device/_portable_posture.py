"""The posture of a session on a system that is not Linux: ``none``, or ``sandbox-exec``."""

from __future__ import annotations

import os
import secrets
import termios
from typing import TYPE_CHECKING, Final

from union.sandbox._backends.base import Identity, Setting
from union.sandbox._linux import host
from union.sandbox._macos.launcher import PortableChannel
from union.sandbox._plan.rootfs import Shown, View
from union.sandbox.on_device._posture import Posture
from union.sandbox.on_device._programs import owner_paths
from union.sandbox.on_device._read_only import ReadOnlyPaths
from union.sandbox.on_device._settings import (
    HostSetting,
    ca_files,
    deduplicated,
    name_files_now,
    named_paths,
)

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Sequence

    from union.sandbox._backends.base import Backend, NetworkShape
    from union.sandbox._core.spec import Limits, SessionSpec
    from union.sandbox._linux.channel import Channel
    from union.sandbox._linux.prepared import Sandbox
    from union.sandbox.on_device._probe import HostFeatures
    from union.sandbox.on_device._programs import Programs
    from union.sandbox.on_device._workdir import WorkDir

__all__ = ["PortablePosture", "inspect_portable", "new_label", "open_terminal"]

_IUTF8: Final = 0x4000
"""The same number on Linux and macOS: backspace erases a whole character."""


class PortablePosture(Posture):
    """The paths, limits and network shape of one session's commands. Nothing is mounted."""

    def _compile(
        self,
        spec: SessionSpec,
        shape: NetworkShape,
        *,
        backend: Backend,
        features: HostFeatures,  # noqa: ARG002 - of Linux
        programs: Programs,  # noqa: ARG002 - for a profile
        found: HostSetting,
    ) -> None:
        self.limits = spec.limits
        self.groups = None
        self.builder = None
        isolated = found.identity.kind != "host"
        self._setting = Setting(
            view=found.view,
            identity=found.identity,
            network=shape,
            network_steps=(),
            egress="kernel" if isolated and shape != "open" else "none",
            landlock_abi=0,
            seccomp=b"",
        )
        self.shape = shape
        self.view = found.view
        self.host_env = found.host_env
        self._backend = backend
        self.plan = backend.plan(self._setting)
        self.isolation = backend.isolation(self._setting, limits=_limit_report(spec.limits))
        self.shares_counters = False  # the system has no such limits
        self.shares_id = False  # the system does not count descriptors in flight per user
        self.owner = None
        self.counts_processes = False
        self.own_processes = 0
        self._terminals: dict[int, tuple[int, int]] = {}

    @property
    def polls_memory(self) -> bool:
        """Always false: the launcher samples the memory."""
        return False

    @property
    def cache_key(self) -> bytes:
        return f"{self.shape} {self.view!r}".encode("utf-8", "surrogateescape")

    def prepare(
        self,
        channel: Channel,
        *,
        cgroups: Sequence[int] = (),  # noqa: ARG002 - of Linux
        on_gone: Callable[[], None] | None = None,
        pid: asyncio.Future[int] | None = None,  # noqa: ARG002 - the launcher samples the memory
        terminals: bool = False,
        template: int = 0,  # noqa: ARG002 - of Linux
    ) -> tuple[int, socket.socket]:
        """Begin a sandbox; see ``PortableChannel.begin``."""
        self._check_open()
        if not isinstance(channel, PortableChannel):
            raise TypeError(f"channel is a {type(channel).__name__}, not a PortableChannel")
        terminal = open_terminal() if terminals else None
        try:
            number, sock = self._begin(channel, on_gone, terminal)
        except BaseException:
            if terminal is not None:
                for fd in terminal:
                    os.close(fd)
            raise
        if terminal is not None:
            self._terminals[number] = terminal
        return number, sock

    def _begin(
        self,
        channel: PortableChannel,
        on_gone: Callable[[], None] | None,
        terminal: tuple[int, int] | None = None,  # noqa: ARG002 - for a profile
    ) -> tuple[int, socket.socket]:
        return channel.begin(label="", memory_bytes=self.limits.memory_bytes, on_gone=on_gone)

    def equip(self, sandbox: Sandbox) -> None:
        """Give the sandbox its terminal, if it was prepared with one."""
        sandbox.terminal = self._terminals.pop(sandbox.number, None)

    def check_ids(self, *, strict: bool) -> None:
        """Accept: commands have the caller's id."""

    def close(self) -> None:
        """Release its root."""
        self._closed = True
        self.root.release()


def inspect_portable(spec: SessionSpec, work: WorkDir, *, programs: Programs) -> HostSetting:
    """Inspect the host once. Raises if a path of the caller is missing or refused."""
    host_env, ca_paths = host.ca_environment()
    isolated = spec.backend != "none"
    python = host.interpreter()
    binds, links = host.system_view()
    added = [
        *owner_paths(python, programs, isolated=isolated),
        *ca_files(ca_paths, programs.places),
        host.uv_shown(programs.uv),
        *(item for item, _ in named_paths(spec, work, programs.places)),
        Shown(source=work.source, path=work.path, writable=True, identity=work.identity),
    ]
    return HostSetting(
        identity=_identity(isolated=isolated),
        view=View(
            system=binds,
            links=links,
            files=(),
            added=tuple(deduplicated(added)),
            fresh_proc=False,
            guarded_proc=(),
            staging="/",
            pivot=False,
            tmp_bytes=0,
            shm_bytes=0,
        ),
        fds=(),
        host_env=host_env,
        python=python,
        read_only=ReadOnlyPaths(),
        scratch=work.scratch,
        name_files=name_files_now(),
    )


def new_label() -> str:
    """Return a name that nothing else has and that cannot be guessed."""
    return f"union.sandbox.run.{secrets.token_hex(16)}"


def _identity(*, isolated: bool) -> Identity:
    uid, gid = os.geteuid(), os.getegid()
    return Identity(
        uid=uid,
        gid=gid,
        host_uid=uid,
        host_gid=gid,
        kind="caller" if isolated else "host",
        deny_setgroups=False,
    )


def _limit_report(limits: Limits) -> tuple[tuple[str, str], ...]:
    report = {
        "processes": "none",
        "session_processes": "none",
        "open_files": "rlimit",
        "file_size": "rlimit",
        "tmp": "none",
        "shm": "none",
        "core": "none",
        "inotify": "none",
    }
    if limits.memory_bytes is not None:
        report["memory"] = "watch"
    if limits.cpus is not None:
        report["cpu"] = "none"
    return tuple(report.items())


def open_terminal() -> tuple[int, int]:
    """Return the host's end of a new terminal, which does not block, and its device."""
    near, device = os.openpty()
    try:
        os.set_blocking(near, False)
        modes = termios.tcgetattr(device)
        modes[0] |= _IUTF8
        termios.tcsetattr(device, termios.TCSANOW, modes)
    except BaseException:
        os.close(near)
        os.close(device)
        raise
    return near, device

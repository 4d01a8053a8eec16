"""``sandbox-exec`` for one session: the profile of each run, its directories and its proxies."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import secrets
import socket
from typing import TYPE_CHECKING, Final

from union.sandbox._linux.prepared import MAX_MESSAGE
from union.sandbox._linux.protocol import Message
from union.sandbox._linux.reports import decode_failed
from union.sandbox._plan import seatbelt
from union.sandbox.errors import BackendUnavailableError, PolicyError
from union.sandbox.on_device._network import loopback_proxy_variables
from union.sandbox.on_device._portable_posture import PortablePosture, new_label

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from union.sandbox._backends.base import Backend, NetworkShape
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.channel import Channel
    from union.sandbox._linux.prepared import Sandbox
    from union.sandbox._macos.launcher import PortableChannel
    from union.sandbox._plan.rootfs import Shown
    from union.sandbox.on_device._probe import HostFeatures
    from union.sandbox.on_device._programs import Programs
    from union.sandbox.on_device._settings import HostSetting

__all__ = ["SeatbeltPosture"]

_PROFILES: Final = "/System/Library/Sandbox/Profiles"
_IMPORTS: Final = ("dyld-support.sb",)
"""Needs of the loader, which change with releases; included if the system has the file."""
_DEVELOPER_LINKS: Final = ("/private/var/select/developer_dir", "/private/var/db/xcode_select_link")
_TOOLS: Final = (
    "/Library/Developer/CommandLineTools",
    "/Library/Frameworks/Python.framework",
    *(f"/opt/homebrew/{name}" for name in ("bin", "Cellar", "Frameworks", "lib", "opt", "share")),
    *(f"/usr/local/{name}" for name in ("Cellar", "Frameworks", "opt")),
)
"""Programs that users install; not Homebrew's ``etc`` and ``var``, which hold settings and data."""
_START_TIMEOUT_S: Final = 30.0
_NESTED_HINT: Final = (
    "this process runs in a sandbox of macOS itself, and these do not nest: start it outside of "
    "the sandbox of the tool that runs it, such as a coding agent"
)
_numbers: Final = itertools.count(1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The directories, proxies and label of one run."""

    directory: str
    label: str
    wrapper: tuple[str, ...]
    variables: dict[str, str]
    listeners: tuple[socket.socket, ...]
    credentials: str


class SeatbeltPosture(PortablePosture):
    """The profile of one network shape, for one session. Each run has a profile file of its own."""

    def _compile(
        self,
        spec: SessionSpec,
        shape: NetworkShape,
        *,
        backend: Backend,
        features: HostFeatures,
        programs: Programs,
        found: HostSetting,
    ) -> None:
        if spec.strict:
            raise BackendUnavailableError(
                f"the {spec.backend!r} backend is refused by strict=True: sandboxes have the "
                "caller's id, and share the process table and the loopback with the host",
                backend=spec.backend,
                missing=("pid namespace", "network namespace"),
                hint="drop strict=True, or open the session in a Linux container or machine",
            )
        super()._compile(
            spec, shape, backend=backend, features=features, programs=programs, found=found
        )
        _check_read_only(self.view.added)
        if found.scratch is None:
            raise RuntimeError("a session of sandbox-exec has no directory for its profiles")
        self._scratch = found.scratch
        self._work_dir = self.view.added[-1].source
        self._uv = programs.uv
        self._places: dict[int, _Place] = {}
        self.isolation = dataclasses.replace(
            self.isolation,
            profile=self._profile("label", f"{self._scratch}/0", self._ports()).digest,
            limits=tuple((dict(self.isolation.limits) | {"processes": "watch"}).items()),
        )

    def _ports(self) -> tuple[int, ...]:
        """Ports of a profile that is only identified, not used."""
        return (1, 2) if self.shape == "filtered" else ()

    def _profile(
        self, label: str, tmp: str, ports: tuple[int, ...], terminal: str | None = None
    ) -> seatbelt.Profile:
        items = [item for item in self.view.added if item.source != self._work_dir]
        read_only = [i.source for i in items if not i.writable and i.is_dir]
        files = [i.source for i in items if not i.writable and not i.is_dir]
        return seatbelt.profile(
            label=label,
            work_dir=self._work_dir,
            tmp=tmp,
            read_only=(*read_only, *_tools(), self._scratch),
            read_only_files=(*files, self._uv, _launcher()),
            read_write=[i.source for i in items if i.writable],
            network=self.shape,
            proxy_ports=ports,
            terminal=terminal,
            imports=[name for name in _IMPORTS if os.path.exists(f"{_PROFILES}/{name}")],
        )

    def _begin(
        self,
        channel: PortableChannel,
        on_gone: Callable[[], None] | None,
        terminal: tuple[int, int] | None = None,
    ) -> tuple[int, socket.socket]:
        place = self._new_place(None if terminal is None else os.ttyname(terminal[1]))
        try:
            number, sock = channel.begin(
                label=place.label,
                wrapper=place.wrapper,
                memory_bytes=self.limits.memory_bytes,
                processes=self.limits.processes,
                on_gone=on_gone,
            )
        except BaseException:
            for listener in place.listeners:
                listener.close()
            raise
        self._places[number] = place
        return number, sock

    def _new_place(self, terminal: str | None) -> _Place:
        directory = f"{self._scratch}/{next(_numbers)}"
        tmp, file = os.path.join(directory, "tmp"), os.path.join(directory, "profile.sb")
        os.mkdir(directory, 0o700)
        os.mkdir(tmp, 0o700)
        listeners: tuple[socket.socket, ...] = ()
        credentials, variables = "", {"TMPDIR": tmp}
        if self.shape == "filtered":
            listeners = tuple(socket.create_server(("127.0.0.1", 0)) for _ in range(2))
            credentials = f"run:{secrets.token_urlsafe(24)}"
        ports = tuple(listener.getsockname()[1] for listener in listeners)
        try:
            if ports:
                variables |= loopback_proxy_variables(credentials, *ports)
            label = new_label()
            made = self._profile(label, tmp, ports, terminal)
            with open(file, "x", encoding="utf-8") as stream:
                stream.write(made.text)
        except BaseException:
            for listener in listeners:
                listener.close()
            raise
        return _Place(
            directory=directory,
            label=label,
            wrapper=seatbelt.command(file, made.parameters),
            variables=variables,
            listeners=listeners,
            credentials=credentials,
        )

    def equip(self, sandbox: Sandbox) -> None:
        """Give the sandbox its terminal, variables, directory and proxies."""
        super().equip(sandbox)
        place = self._places.pop(sandbox.number)
        sandbox.variables = place.variables
        sandbox.directory = place.directory
        sandbox.listeners = place.listeners
        sandbox.credentials = place.credentials

    async def try_out(self, channel: Channel) -> None:
        """Start one sandbox with this profile, without a command.

        Raises:
            BackendUnavailableError: ``sandbox-exec`` refuses, with its own message.

        """
        number, sock = self.prepare(channel)
        place = self._places.pop(number)
        try:
            message = await _first_message(sock)
        finally:
            sock.close()
            for listener in place.listeners:
                listener.close()
        if int.from_bytes(message[:4], "little") == Message.READY:
            return
        text = ""
        if message:
            failure = decode_failed(message)
            text = failure.stderr.decode("utf-8", "replace").strip()
            text = text or (os.strerror(failure.error) if failure.error else "")
        text = "".join(c if c.isprintable() else " " for c in text)
        raise BackendUnavailableError(
            "the 'sandbox-exec' backend does not work here: "
            + (text or "the sandbox ended before it was ready (a program aborted at its start)"),
            backend="sandbox-exec",
            missing=("sandbox-exec",),
            hint=_NESTED_HINT
            if "not permitted" in text
            else "run `sbx doctor`, and report this with the version of macOS",
        )


def _launcher() -> str:
    from union.sandbox._macos.launcher import PortableLauncher

    return os.path.realpath(PortableLauncher.binary())


def _tools() -> Iterator[str]:
    links = (os.path.realpath(link) for link in _DEVELOPER_LINKS if os.path.islink(link))
    for path in dict.fromkeys((*links, *_TOOLS)):
        if os.path.isdir(path):
            yield os.path.realpath(path)


def _check_read_only(added: tuple[Shown, ...]) -> None:
    """Refuse a read-only path inside a writable one: a profile protects no directory above it."""
    for item in added:
        for other in added:
            inside = item.source.startswith(other.source + "/") or item.source == other.source
            if inside and other.writable and not item.writable and item is not other:
                raise PolicyError(
                    f"{item.path} must be read-only, and lies in {other.path}, which is writable; "
                    "backend='sandbox-exec' cannot enforce that",
                    argument="read_only_paths",
                    hint="use a work dir and read_write_paths that contain neither the running "
                    "Python nor a read-only path",
                )


async def _first_message(sock: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(sock.fileno(), readable.set)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while True:
                await readable.wait()
                readable.clear()
                try:
                    return sock.recv(MAX_MESSAGE)
                except BlockingIOError:
                    continue
    except TimeoutError:
        return b""
    finally:
        loop.remove_reader(sock.fileno())

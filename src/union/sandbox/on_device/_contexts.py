"""Contexts of a session on this machine: start, restart and end their interpreters."""

from __future__ import annotations

import asyncio
import functools
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._contexts import python_driver
from union.sandbox._core.processes import MAX_LISTED
from union.sandbox._core.spec import NetworkSpec, RunSpec
from union.sandbox._linux.process_list import list_processes, list_sandbox
from union.sandbox._policy.entries import has_http
from union.sandbox._session import threads
from union.sandbox._session.threads import until_done
from union.sandbox._system import IS_LINUX, NAME
from union.sandbox.errors import SandboxUsageError
from union.sandbox.on_device._cell_channels import FramedChannel, NodeChannel, ShellChannel
from union.sandbox.on_device._interpreter import Interpreter
from union.sandbox.on_device._network import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._contexts.specs import CellSink, CellSpec, ContextSpec
    from union.sandbox._core.isolation import Isolation
    from union.sandbox._core.processes import ProcessInfo
    from union.sandbox._core.spec import SessionSpec
    from union.sandbox._linux.command import Command
    from union.sandbox._linux.run import LocalRun
    from union.sandbox.on_device._cell_channels import CellChannel
    from union.sandbox.on_device._network import SessionNetwork
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._runner import Runner
    from union.sandbox.on_device._venv import Venv

__all__ = ["LocalContext"]

_BASH: Final = ("/bin/bash", "--noprofile", "--norc", "--noediting", "-i")
_EXEC_NODE: Final = 'exec node -e "$1" 9<&100 100<&- 101<&-'
"""Node closes inherited descriptors below 16 in its children, and no others."""
_SPARE_DELAY_S: Final = 0.05
"""Delay before the next driver is started, so that it does not slow the first cell down."""


class LocalContext:
    """A context on this machine (the LiveContext protocol)."""

    def __init__(
        self,
        runner: Runner,
        spec: ContextSpec,
        *,
        session: SessionSpec,
        network: SessionNetwork,
    ) -> None:
        self._runner = runner
        self._spec = spec
        self._network = network
        self._run_spec = _run_spec(spec, session)
        self._interpreter: Interpreter | None = None
        self._run: LocalRun | None = None
        self._is_closed = False
        self._changing = asyncio.Lock()
        self.on_between: Callable[[int, bytes], None] = lambda _fd, _data: None
        """Receives output that is written while no cell runs."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when the interpreter has ended."""

    async def open(self) -> None:
        """Start the interpreter."""
        if self._runner.pool.uses_host_root:
            raise SandboxUsageError(
                "contexts need a backend with a private root, and "
                f"backend={self._runner.pool.backend!r} has none"
                if IS_LINUX
                else f"contexts need a backend of Linux, and this is {NAME}",
                argument="backend",
                code="context-unsupported",
                hint="use backend='userns' or backend='bubblewrap'",
            )
        async with self._changing:
            await self._start()

    async def _start(self) -> None:
        has_network = shape_of(self._run_spec.network) == "filtered"
        interpreter = Interpreter(grace_s=self._spec.interrupt_grace_s, has_network=has_network)
        self._interpreter = interpreter
        is_python = self._spec.language == "python"
        is_bash = self._spec.language == "bash"
        send = {
            "python": self._send_python,
            "bash": self._send_bash,
            "node": self._send_node,
        }

        def on_listeners(fds: list[int]) -> None:
            egress = self._network.open(self._run_spec.network, fds, interpreter, ttl_s=0)
            egress.suspend()
            interpreter.on_egress(egress)
            run.close_listeners = egress.aclose

        run, near, posture = await self._runner.start_interpreter(
            self._run_spec,
            interpreter,
            send=send[self._spec.language],
            on_listeners=on_listeners,
        )
        self._run = run
        channel: CellChannel = FramedChannel(near)
        if not is_python:
            channel = ShellChannel(near, run.feed_stdin) if is_bash else NodeChannel(near)
        await interpreter.begin(run, channel)
        interpreter.on_between = self._on_between
        interpreter.gone.add_done_callback(lambda _: self._on_gone(interpreter))
        if is_python:
            asyncio.get_running_loop().call_later(
                _SPARE_DELAY_S, self._runner.keep_driver, posture, self._run_spec
            )

    def _send_python(
        self, posture: Posture, command: Command, venv: Venv
    ) -> tuple[LocalRun, socket.socket]:
        return self._runner.pool.start_driver(posture, command._replace(script=None), venv=venv)

    def _send_bash(
        self, posture: Posture, command: Command, _venv: Venv
    ) -> tuple[LocalRun, socket.socket]:
        return self._send_program(posture, command, stdin="pipe")

    def _send_node(
        self, posture: Posture, command: Command, _venv: Venv
    ) -> tuple[LocalRun, socket.socket]:
        return self._send_program(posture, command, stdin=None)

    def _send_program(
        self, posture: Posture, command: Command, *, stdin: str | None
    ) -> tuple[LocalRun, socket.socket]:
        self._runner.pool.channel()
        # A stream: bash reads single bytes, which would discard the rest of a packet.
        near, far = socket.socketpair()
        near.setblocking(False)
        try:
            run = self._runner.pool.sandboxes.take(posture)
            run.send(command, pipes=(True, True), stdin=stdin, wait=far.detach())
        except BaseException:
            near.close()
            far.close()
            raise
        return run, near

    def _on_between(self, fd: int, data: bytes) -> None:
        self.on_between(fd, data)

    def _on_gone(self, interpreter: Interpreter) -> None:
        if interpreter is self._interpreter:
            self.on_lost()

    # The LiveContext protocol.

    @property
    def isolation(self) -> Isolation:
        if self._run is None:
            raise RuntimeError("the context has not started")
        return self._run.isolation

    @property
    def is_alive(self) -> bool:
        return self._interpreter is not None and self._interpreter.is_alive

    @property
    def between(self) -> tuple[bytes, bytes]:
        return self._opened().between

    def start(self, number: int, spec: CellSpec, sink: CellSink) -> None:
        if has_http(spec.network):
            self._runner.trust.ensure()
            variables = self._runner.trust.variables(spec.network)
            spec = spec._replace(env=tuple((variables | dict(spec.env)).items()))
        self._opened().start(number, spec, sink)

    def interrupt(self) -> None:
        self._opened().interrupt()

    def resume(self) -> None:
        self._opened().resume()

    async def processes(self) -> tuple[ProcessInfo, ...]:
        run = self._run
        if run is None or not self.is_alive:
            return ()
        sandbox = run.sandbox
        if sandbox.machine is not None:
            of_all = await threads.files.run(self, list_processes, sandbox.machine.proc)
            return tuple(info for label, info in of_all if label == sandbox.label)[:MAX_LISTED]
        first = await sandbox.channel.locate(sandbox.number)
        if not first:
            return ()
        found = await threads.files.run(self, list_sandbox, first)
        # Else the number may have been that of another process.
        return found if await sandbox.channel.locate(sandbox.number) == first else ()

    async def restart(self) -> None:
        async with self._changing:
            await self._end()
            await self._start()

    async def aclose(self) -> None:
        self._is_closed = True
        async with self._changing:
            await self._end()

    async def _end(self) -> None:
        run, interpreter = self._run, self._interpreter
        if run is None or interpreter is None:
            return
        run.end_now("closed")
        await until_done(run.finished)
        run.output.abandon()
        interpreter.close()

    def _opened(self) -> Interpreter:
        if self._interpreter is None:
            raise RuntimeError("the context has not started")
        return self._interpreter


@functools.cache
def _node_source() -> str:
    return Path(python_driver.__file__).with_name("node_driver.js").read_text("utf-8")


def _run_spec(spec: ContextSpec, session: SessionSpec) -> RunSpec:
    """Return the command that starts the interpreter.

    Its network is filtered, so that each cell can have its own policy. A session that never allows
    a network gets a sandbox without one.
    """
    network = session.network
    if not session.network_is_ceiling or network.mode != "blocked":
        network = NetworkSpec(
            mode="allowlist",
            deny=network.deny,
            proxy_url=network.proxy_url,
            socks_url=network.socks_url,
        )
    if spec.language == "bash":
        return RunSpec(kind="argv", argv=_BASH, env=spec.env, network=network)
    if spec.language == "node":
        argv = ("/bin/bash", "-c", _EXEC_NODE, "bash", _node_source())
        return RunSpec(kind="argv", argv=argv, env=spec.env, network=network)
    return RunSpec(kind="python", env=spec.env, network=network)

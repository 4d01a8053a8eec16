"""The private root of a session: the inspected host, and the mounts that its sandboxes start with.

Sandboxes with different networks differ only in steps of their own, so all postures of a session
use one private root. A call with paths of its own has another one.
"""

from __future__ import annotations

import errno
import functools
import os
from typing import TYPE_CHECKING

from union.sandbox._linux.descriptors import sealed_memfd
from union.sandbox._linux.machine import Machine
from union.sandbox._plan.layers import attach_plan
from union.sandbox.on_device._probe import Outcome, wait_for_shared
from union.sandbox.on_device._settings import name_files_now

if TYPE_CHECKING:
    from collections.abc import Iterable

    from union.sandbox._backends.base import NetworkShape
    from union.sandbox._linux.channel import Channel
    from union.sandbox._plan.plan import Plan
    from union.sandbox.on_device._settings import HostSetting
    from union.sandbox.on_device._work_layers import HeldMount

__all__ = ["PrivateRoot"]


class PrivateRoot:
    """Own the descriptors that plans refer to, and the namespaces of the shared part.

    Every posture that uses it holds one reference; the last ``release()`` closes it.
    """

    def __init__(self, found: HostSetting) -> None:
        self.found = found
        self.fds = found.fds
        """Descriptors that binds refer to by index; empty once the shared part is built."""
        self.namespaces: tuple[int, ...] = ()
        """User and mount namespace of the shared part; empty before it is built."""
        self._plain: tuple[int, ...] = ()
        """The namespaces whose work dir is the plain directory, once it has layers."""
        self.layers: HeldMount | None = None
        """The layers of the work dir, which the shared part shows in place of it."""
        self.machine: Machine | None = None
        """The machine that commands join; None for commands that have nothing in common."""
        self._references = 1
        self.is_closed = False

    def share(self) -> PrivateRoot:
        """Return it with one more reference."""
        self.check_open()
        self._references += 1
        return self

    def release(self) -> None:
        """Drop one reference; their numbers may be reused after the last one."""
        self._references -= 1
        if self._references == 0:
            self.is_closed = True
            _close_all((*self.fds, *self.namespaces, *self._plain))
            self.fds, self.namespaces, self._plain = (), (), ()
            if self.machine is not None:
                self.machine.close()
            self.found.read_only.close()

    def check_open(self) -> None:
        if self.is_closed:
            raise OSError(errno.ESHUTDOWN, "the session was closed meanwhile")

    def is_intact(self, shape: NetworkShape) -> bool:
        """Return whether the host's files that it shows are still in place.

        Only the open network shows the host's own files for name lookups. A program that replaces
        one of them leaves the old file mounted.
        """
        if shape == "open" and name_files_now() != self.found.name_files:
            return False
        read_only = self.found.read_only
        return not read_only.watched or read_only.is_intact()

    async def build(self, plan: Plan, channel: Channel) -> Outcome:
        """Build the shared part by ``plan``, which is the same for all users, unless it is built.

        The caller makes sure that only one build runs at a time.
        """
        self.check_open()
        if self.namespaces:
            return Outcome(None)
        encoded = sealed_memfd("plan", plan.encode())
        try:
            _, sock = channel.prepare(plan, encoded, fds=self.fds)
        finally:
            os.close(encoded)
        try:
            outcome, namespaces = await wait_for_shared(sock)
        finally:
            sock.close()
        if self.is_closed:
            _close_all(namespaces)
            self.check_open()
        self.namespaces = namespaces
        if namespaces:
            # The shared part holds what the plan refers to; an idle session keeps little open.
            _close_all(self.fds)
            self.fds = ()
        if namespaces and self.layers is not None:
            mount = await self.layers.copy(channel)
            try:
                outcome = await self.attach(mount, channel)
            finally:
                os.close(mount)
            if outcome.failure is not None:
                # Nothing may run in the plain directory, which has layers above it.
                _close_all(self.namespaces)
                self.namespaces = ()
        return outcome

    async def attach(self, mount: int, channel: Channel) -> Outcome:
        """Show a mount as the work dir, from the next sandbox on.

        The mounts are copied from those with the plain directory, so that nothing of an earlier
        state is left below.
        """
        plan = attach_plan(self.found.view)
        plain = self._plain or self.namespaces
        encoded = sealed_memfd("plan", plan.encode())
        try:
            _, sock = channel.prepare(plan, encoded, fds=(mount,), shared=plain)
        finally:
            os.close(encoded)
        try:
            outcome, namespaces = await wait_for_shared(sock)
        finally:
            sock.close()
        if self.is_closed:
            _close_all(namespaces)
            self.check_open()
        if namespaces:
            if self._plain:
                _close_all(self.namespaces)
            self._plain, self.namespaces = plain, namespaces
        return outcome

    async def start_machine(
        self, plan: Plan, channel: Channel, *, budgets: tuple[int, int]
    ) -> Outcome:
        """Start the machine by ``plan``, unless it was started; the shared part is built."""
        self.check_open()
        if self.machine is not None:
            return Outcome(None)
        encoded = sealed_memfd("plan", plan.encode())
        try:
            number, sock = channel.prepare(plan, encoded, shared=self.namespaces, budgets=budgets)
        finally:
            os.close(encoded)
        try:
            outcome, fds = await wait_for_shared(sock, Machine.DESCRIPTORS)
        except BaseException:
            sock.close()
            raise
        if not fds or self.is_closed:
            sock.close()
            _close_all(fds)
            self.check_open()
            return outcome
        self.machine = Machine(
            sock, fds, channel.readers, locate=functools.partial(channel.locate, number)
        )
        return outcome


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)

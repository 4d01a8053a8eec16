"""The template of a session: a Python that has imported ``preload``, to fork others from.

It is started in the namespaces of the session's private root, by the launcher, and executes only
the owner's interpreter and packages. Where there is no template, every Python is started.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from union.sandbox._backends.userns import NEW
from union.sandbox._core.files import VENV_DIR
from union.sandbox._linux import host
from union.sandbox._linux.descriptors import sealed_memfd
from union.sandbox._linux.launcher import LIBRARY
from union.sandbox._linux.protocol import Message
from union.sandbox._linux.remedies import explain
from union.sandbox._linux.reports import MalformedReportError, decode_failed
from union.sandbox._linux.spares import Budget
from union.sandbox._plan import plan as p
from union.sandbox._plan import template
from union.sandbox._plan.rootfs import PYTHON_SLOT
from union.sandbox.on_device._drivers import driver_source
from union.sandbox.on_device._template_boot import DRIVER_FILE, READY, REHEARSED_SCRIPT
from union.sandbox.on_device._venv import HOOK_FILE, venv_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from union.sandbox._linux.channel import Channel
    from union.sandbox.on_device._posture import Posture
    from union.sandbox.on_device._private_root import PrivateRoot

__all__ = ["Template"]

_BOOT: Final = Path(__file__).with_name("_template_boot.py")
_MODULE: Final = "_union_sandbox_template"
_NAMESPACES: Final = ("mount", "net", "ipc", "uts")
_ENVIRONMENT: Final = ("LANG=C.UTF-8", "LC_ALL=C.UTF-8", "LD_BIND_NOW=1")
"""Constants: for the encodings of a sandbox, and so that no fork has to find functions again."""
_MAX_REPORT: Final = 4096
_log = logging.getLogger("union.sandbox")


class Template:
    """The template of one session.

    Args:
        preload: modules of the owner that it imports.

    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._preload = preload
        self.refusal = ""
        """Why it cannot be used after all; empty if it was not refused."""
        self._root: PrivateRoot | None = None
        self._channel: Channel | None = None
        self._sock: socket.socket | None = None
        self._number = 0
        self._is_ready = False
        self._ticket = 0
        self._shut_down: Callable[[], None] = lambda: None
        self._waiting: list[Callable[[], None]] = []
        self._wanted = 0
        self._posture: Posture | None = None
        """The posture that it was started for."""

    @property
    def is_slow(self) -> bool:
        """Whether it imports modules: then no other Python imports them at the same time."""
        return bool(self._preload)

    @property
    def is_worthwhile(self) -> bool:
        """Whether the session has asked before; a session with one Python command has none."""
        self._wanted += 1
        return self._wanted > 1 or self.is_slow

    @property
    def is_ready(self) -> bool:
        """Whether it serves forks."""
        return self._is_ready

    def number(self, posture: Posture) -> int:
        """Return its number if sandboxes of this posture can be forked from it now, else 0."""
        if not self._is_ready or self._root is not posture.root or not Budget.claim(self._ticket):
            return 0
        self._ticket = Budget.add(self._shut_down)  # it is the newest again
        return self._number

    def start(self, posture: Posture, channel: Channel, on_ready: Callable[[], None]) -> bool:
        """Start it unless it runs; return whether forks are, or will be, possible.

        ``on_ready`` is called when it becomes ready, not if it is ready.
        """
        if self.refusal:
            posture.start_pythons()
        if not posture.forks_pythons or not posture.root.namespaces:
            return False
        if self._root is posture.root and Budget.holds(self._ticket):
            if not self._is_ready:
                self._waiting.append(on_ready)
            return True
        self.release()
        try:
            self._begin(posture, channel)
        except OSError:
            _log.debug("starting a template failed", exc_info=True)
            return False
        self._posture = posture
        self._waiting.append(on_ready)
        return True

    def _begin(self, posture: Posture, channel: Channel) -> None:
        plan = _plan(posture, self._preload)
        encoded = sealed_memfd("plan", plan.encode())
        try:
            number, sock = channel.prepare(plan, encoded, shared=posture.root.namespaces)
        finally:
            os.close(encoded)
        try:
            channel.readers.add(sock.fileno(), self._on_report)
        except BaseException:
            sock.close()
            raise
        self._root, self._channel, self._sock = posture.root, channel, sock
        self._number = number
        self._shut_down = lambda: _shut_down(sock)
        self._ticket = Budget.add(self._shut_down)

    def _on_report(self) -> None:
        sock = self._sock
        if sock is None:
            return
        try:
            report = sock.recv(_MAX_REPORT)
        except BlockingIOError:
            return
        except OSError:
            report = b""
        if report == READY:
            self._is_ready = True
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()
            return
        was_expected = self._is_ready or not Budget.holds(self._ticket)
        self.release()
        if not was_expected:
            self.refusal = _reason(report)
            if self._posture is not None:
                self._posture.start_pythons()
            _log.warning("Pythons are started, not forked from a template: %s", self.refusal)

    def release(self) -> None:
        """End it; sandboxes that were forked from it are not affected."""
        sock, self._sock = self._sock, None
        if sock is not None and self._channel is not None:
            with contextlib.suppress(OSError, KeyError, ValueError):
                self._channel.readers.remove(sock.fileno())
            sock.close()
            Budget.claim(self._ticket)
        self._root = self._channel = None
        self._is_ready = False
        self._waiting.clear()


def _shut_down(sock: socket.socket) -> None:
    """End a template from any thread, without closing a descriptor that is watched."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reason(report: bytes) -> str:
    if not report:
        return "the template ended before it was ready"
    if int.from_bytes(report[:4], sys.byteorder) != Message.FAILED:
        return report.decode("utf-8", "replace")  # of its boot code, which begins with a name
    try:
        return explain(*decode_failed(report)[:2], "").reason
    except MalformedReportError:
        return "the template sent a malformed message"


def _plan(posture: Posture, preload: tuple[str, ...]) -> p.Plan:
    python = host.interpreter()
    venv = f"{posture.view.work_dir}/{VENV_DIR}"
    site_packages = f"{venv}/lib/python{python.version}/site-packages"
    library = f"{site_packages}/{LIBRARY.name}"
    arguments = (library, venv, site_packages, list(python.site_dirs), list(preload))
    hook = f"import {_MODULE}; {_MODULE}.begin(*{arguments!r})\n"
    files = {
        f"{venv}/pyvenv.cfg": venv_config(python).encode(),
        f"{site_packages}/{_MODULE}.pth": hook.encode(),
        f"{site_packages}/{_MODULE}.py": _BOOT.read_bytes(),
        f"{site_packages}/_union_sandbox.py": HOOK_FILE.read_bytes(),
        library: LIBRARY.read_bytes(),
        PYTHON_SLOT: REHEARSED_SCRIPT,
    }
    if preload:
        # The driver of contexts, so that they share its memory too.
        files[f"{site_packages}/{DRIVER_FILE}"] = driver_source()
    program = f"{venv}/bin/python"
    environment = (*_ENVIRONMENT, f"HOME={posture.view.work_dir}")
    steps = template.template_steps(posture.view, files=files, links={program: python.executable})
    who = posture.identity
    return p.Plan(
        steps=(*steps, template.Template((program, PYTHON_SLOT), environment)),
        clone_flags=sum(NEW[name] for name in _NAMESPACES),
        uid=(who.uid, who.uid),
        gid=(who.gid, who.gid),
        deny_setgroups=who.deny_setgroups,
    )

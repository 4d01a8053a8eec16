"""The report of ``doctor()``: its values and how they are printed."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from union.sandbox._core.isolation import Isolation

__all__ = ["Attack", "BackendReport", "DoctorReport", "Layer"]

_WIDTH = 100
_NAME = 17


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One escape check: an attempt from inside a sandbox to reach something of the host."""

    name: str
    """A short name, such as ``network``."""
    tried: str
    """The attempt, in words."""
    outcome: Literal["held", "weaker", "failed"]
    """``held``: blocked. ``weaker``: it succeeded where `Isolation` reports a weaker layer.
    ``failed``: it succeeded although `Isolation` reports protection."""
    detail: str = ""
    """The result of the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """Whether one backend works on this machine, with its isolation and its escape checks."""

    name: str
    """The name for ``backend=``."""
    available: bool
    """Whether a sandbox of it was opened."""
    reason: str = ""
    """Why it is not available."""
    hint: str = ""
    """The remedy."""
    isolation: Isolation | None = None
    """The layers verified on a live sandbox; None if there was none."""
    attacks: tuple[Attack, ...] = ()
    """The escape checks that were run."""

    @property
    def held(self) -> bool:
        """Whether no escape check succeeded against a layer that is reported as enforced."""
        return all(attack.outcome != "failed" for attack in self.attacks)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {
            "name": self.name,
            "available": self.available,
            "reason": self.reason,
            "hint": self.hint,
            "isolation": self.isolation.to_dict() if self.isolation else None,
            "attacks": [dataclasses.asdict(attack) for attack in self.attacks],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One kernel or system feature that backends use."""

    name: str
    """A short name, such as ``user-namespaces``."""
    available: bool
    """Whether this machine has it."""
    detail: str = ""
    """The version or place found, or why it is missing."""
    hint: str = ""
    """The remedy; empty if there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """The isolation that works on this machine, as tested by ``doctor()``. Can be printed."""

    version: str
    """The version of this package."""
    python: str
    """The version of Python."""
    system: str
    """The operating system and its release."""
    machine: str
    """The architecture, such as ``x86_64``."""
    uid: int
    """The user id of this process."""
    default: str
    """The name of the default backend."""
    backends: tuple[BackendReport, ...]
    """A report for each backend."""
    layers: tuple[Layer, ...]
    """A report for each feature of the kernel and the system."""

    @property
    def ok(self) -> bool:
        """Whether the default backend works and no escape check failed on any backend."""
        works = any(b.name == self.default and b.available for b in self.backends)
        return works and all(backend.held for backend in self.backends)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON; releases add keys but never rename them."""
        return {
            "ok": self.ok,
            "version": self.version,
            "python": self.python,
            "system": self.system,
            "machine": self.machine,
            "uid": self.uid,
            "default": self.default,
            "backends": [backend.to_dict() for backend in self.backends],
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }

    def __str__(self) -> str:
        lines = [
            f"unionai-sandbox {self.version}, Python {self.python}, uid {self.uid}",
            f"{self.system} {self.machine}",
            "",
            "Backends",
        ]
        for backend in self.backends:
            lines += _backend(backend, is_default=backend.name == self.default)
        lines += ["", "Layers"]
        for layer in self.layers:
            lines += _entry(layer.name, _yes(layer.available, layer.detail))
            lines += _note("fix", "" if layer.available else layer.hint)
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        leaking = [backend.name for backend in self.backends if not backend.held]
        if leaking:
            return f"NOT SAFE: escape checks failed with {', '.join(leaking)}. Please report this."
        if self.ok:
            return f"OK: default backend ({self.default}) works; all escape checks were blocked."
        others = [b.name for b in self.backends if b.available and b.isolation is not None]
        also = f" Available instead: backend={' or '.join(map(repr, others))}." if others else ""
        return f"NOT OK: default backend ({self.default}) does not work on this machine.{also}"


def _yes(available: bool, detail: str) -> str:  # noqa: FBT001 - a column, not an option
    return ("yes" if available else "no") + (f": {detail}" if detail else "")


def _entry(name: str, text: str) -> list[str]:
    """Return the lines of a name and its text, which wraps in a column of its own."""
    room = _WIDTH - 2 - _NAME
    first, *rest = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"  {name:<{_NAME}}{first}", *(" " * (2 + _NAME) + line for line in rest)]


def _note(label: str, text: str) -> list[str]:
    return _entry("", f"{label}: {text}") if text else []


def _enforced(found: Isolation) -> str:
    if found.profile:
        return (
            f"profile {found.profile}, ids {found.ids}, processes by {found.processes}, "
            f"loopback {found.loopback}; no namespaces, no private root, no system-call filter"
        )
    return (
        f"{len(found.namespaces)} namespaces, root {found.root}, proc {found.proc}, "
        f"ids {found.ids}, Landlock ABI {found.landlock_abi}, "
        f"{'system-call filter' if found.seccomp else 'no system-call filter'}"
    )


def _backend(backend: BackendReport, *, is_default: bool) -> list[str]:
    name = backend.name + (" *" if is_default else "")
    lines = _entry(name, _yes(backend.available, backend.reason))
    lines += _note("fix", "" if backend.available else backend.hint)
    if backend.isolation is not None:
        found = backend.isolation
        lines += _note("enforced", _enforced(found))
    for outcome in ("held", "weaker", "failed"):
        same = [attack for attack in backend.attacks if attack.outcome == outcome]
        if outcome == "held":
            lines += _note(outcome, ", ".join(attack.name for attack in same))
            continue
        for attack in same:
            lines += _note(outcome, f"{attack.name}: {attack.tried}: {attack.detail}")
    return lines

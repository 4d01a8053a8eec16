"""What a machine offers: the values that ``doctor`` returns, and how they read."""

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
    """One try from inside a sandbox to get at something of the host.

    ``outcome`` is ``held``, ``weaker`` (it got through, and the session's own report says so) or
    ``failed`` (it got through although the report promises otherwise).
    """

    name: str
    tried: str
    outcome: Literal["held", "weaker", "failed"]
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendReport:
    """Whether a backend works here; if so, what it enforces and how it stood up to attacks."""

    name: str
    available: bool
    reason: str = ""
    hint: str = ""
    isolation: Isolation | None = None
    attacks: tuple[Attack, ...] = ()

    @property
    def held(self) -> bool:
        """Whether nothing got through that the report promises to keep out."""
        return all(attack.outcome != "failed" for attack in self.attacks)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON."""
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
    """One thing of the kernel or the system that backends build on."""

    name: str
    available: bool
    detail: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    """What this machine offers, as tried a moment ago. ``print`` it, or take ``to_dict()``."""

    version: str
    python: str
    system: str
    machine: str
    uid: int
    default: str
    backends: tuple[BackendReport, ...]
    layers: tuple[Layer, ...]

    @property
    def ok(self) -> bool:
        """Whether the default backend works, and no attack on any backend got through unsaid."""
        works = any(b.name == self.default and b.available for b in self.backends)
        return works and all(backend.held for backend in self.backends)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, ready for JSON; keys are added, never renamed."""
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
            return f"NOT SAFE: attacks got through in {', '.join(leaking)}. Please report this."
        if self.ok:
            return f"Well: the default backend, {self.default}, works, and every attack was held."
        others = [b.name for b in self.backends if b.available and b.isolation is not None]
        also = f" These work: backend={' or '.join(map(repr, others))}." if others else ""
        return f"Not well: the default backend, {self.default}, does not work here.{also}"


def _yes(available: bool, detail: str) -> str:  # noqa: FBT001 - a column, not an option
    return ("yes" if available else "no") + (f": {detail}" if detail else "")


def _entry(name: str, text: str) -> list[str]:
    """A name, and beside it text that is wrapped in its own column."""
    room = _WIDTH - 2 - _NAME
    first, *rest = textwrap.wrap(text, room, break_on_hyphens=False, break_long_words=False) or [""]
    return [f"  {name:<{_NAME}}{first}", *(" " * (2 + _NAME) + line for line in rest)]


def _note(label: str, text: str) -> list[str]:
    return _entry("", f"{label}: {text}") if text else []


def _backend(backend: BackendReport, *, is_default: bool) -> list[str]:
    name = backend.name + (" *" if is_default else "")
    lines = _entry(name, _yes(backend.available, backend.reason))
    lines += _note("fix", "" if backend.available else backend.hint)
    if backend.isolation is not None:
        found = backend.isolation
        lines += _note(
            "enforced",
            f"{len(found.namespaces)} namespaces, root {found.root}, proc {found.proc}, "
            f"ids {found.ids}, Landlock ABI {found.landlock_abi}, "
            f"{'system-call filter' if found.seccomp else 'no system-call filter'}",
        )
    for outcome in ("held", "weaker", "failed"):
        same = [attack for attack in backend.attacks if attack.outcome == outcome]
        if outcome == "held":
            lines += _note(outcome, ", ".join(attack.name for attack in same))
            continue
        for attack in same:
            lines += _note(outcome, f"{attack.name}: {attack.tried}: {attack.detail}")
    return lines

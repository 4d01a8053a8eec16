"""What the first process of a sandbox is asked to run, as it is sent there."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from union.sandbox._linux.protocol import RLIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Command", "packed_rlimits"]


def packed_rlimits(limits: Iterable[tuple[int, int, int]]) -> bytes:
    """Limits of a command, each of them (resource, soft, hard)."""
    return b"".join(RLIMIT.pack(kind, 0, soft, hard) for kind, soft, hard in limits)


class Command(NamedTuple):
    """What the sandbox's first process is asked to run."""

    programs: Sequence[str]
    """Paths to try in turn."""
    argv: Sequence[str]
    env: Sequence[str]
    cwd: str
    rlimits: bytes = b""
    """As ``packed_rlimits`` makes them."""
    script: bytes | None = None
    slot: int = 0

    def with_env(self, *items: str) -> Command:
        return self._replace(env=(*self.env, *items))

    def body(self) -> bytes:
        strings = "\0".join((self.cwd, *self.programs, *self.argv, *self.env, ""))
        return self.rlimits + strings.encode("utf-8", "surrogateescape")

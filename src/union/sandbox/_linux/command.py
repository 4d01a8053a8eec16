"""A command in the form in which the first process of a sandbox receives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from union.sandbox._linux.protocol import RLIMIT

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Command", "packed_rlimits"]


def packed_rlimits(limits: Iterable[tuple[int, int, int]]) -> bytes:
    """Encode resource limits, each of them (resource, soft, hard)."""
    return b"".join(RLIMIT.pack(kind, 0, soft, hard) for kind, soft, hard in limits)


class Command(NamedTuple):
    """A program with its arguments, environment, working directory and limits."""

    programs: Sequence[str]
    """Paths of the program, tried in this order."""
    argv: Sequence[str]
    env: Sequence[str]
    cwd: str
    rlimits: bytes = b""
    """Encoded by `packed_rlimits`."""
    script: bytes | None = None
    """Content for the file of the slot."""
    slot: int = 0
    """Index of the file that the plan created for a script."""

    def with_env(self, *items: str) -> Command:
        """Return the same command with more entries of the environment (``NAME=value``)."""
        return self._replace(env=(*self.env, *items))

    def with_variables(self, variables: Mapping[str, str]) -> Command:
        """Return the same command with these variables in place of those of the same name."""
        kept = [item for item in self.env if item.partition("=")[0] not in variables]
        return self._replace(env=(*kept, *(f"{n}={v}" for n, v in variables.items())))

    def body(self) -> bytes:
        """Return the part of an EXEC message that follows its head."""
        strings = "\0".join((self.cwd, *self.programs, *self.argv, *self.env, ""))
        return self.rlimits + strings.encode("utf-8", "surrogateescape")

"""Classic BPF for seccomp: decision trees, and their layout as instructions.

A filter is a tree of three kinds of node. Nodes are values, so equal subtrees are laid out once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

__all__ = [
    "ALLOW",
    "ARCH",
    "EINVAL",
    "ENOSYS",
    "EPERM",
    "EPROTONOSUPPORT",
    "JEQ",
    "JGE",
    "JSET",
    "LOW",
    "NR",
    "SUCCESS",
    "Branch",
    "Load",
    "Node",
    "Return",
    "assemble",
]

JEQ: Final = 0x15
JGE: Final = 0x35
JSET: Final = 0x45
_LD_ABS: Final = 0x20
_AND: Final = 0x54
_RET: Final = 0x06
_JA: Final = 0x05

NR: Final = 0
ARCH: Final = 4
LOW: Final = (16, 24, 32, 40, 48, 56)
"""Offset of the low half of each argument; the machines are little-endian, the high half is +4."""

_MAX_INSTRUCTIONS: Final = 4096
_MAX_JUMP: Final = 253
"""A conditional jump reaches 255 instructions; two may be trampolines for its own targets."""


@dataclass(frozen=True, slots=True)
class Return:
    """Return a verdict for the call."""

    verdict: int


@dataclass(frozen=True, slots=True)
class Load:
    """Put a 32-bit word of ``seccomp_data``, masked if asked, into the accumulator."""

    offset: int
    then: Node
    mask: int | None = None


@dataclass(frozen=True, slots=True)
class Branch:
    """Compare the accumulator with ``k``."""

    op: int
    k: int
    then: Node
    other: Node


Node: TypeAlias = Return | Load | Branch

ALLOW: Final = Return(0x7FFF_0000)
EPERM: Final = Return(0x0005_0000 | 1)
EINVAL: Final = Return(0x0005_0000 | 22)
EPROTONOSUPPORT: Final = Return(0x0005_0000 | 93)
ENOSYS: Final = Return(0x0005_0000 | 38)
SUCCESS: Final = Return(0x0005_0000)
"""The call is not performed and returns 0."""


class _Assembler:
    """Emit a tree from its last instruction to its first.

    Backwards, every jump target is already placed when the jump is written, so distances are known
    at once. A position is the count of instructions that follow.
    """

    def __init__(self) -> None:
        self.reversed: list[bytes] = []
        self._placed: dict[Node, int] = {}

    def place(self, node: Node) -> int:
        known = self._placed.get(node)
        # A verdict costs one instruction, as a trampoline would: far away, write it again.
        if known is not None and (
            not isinstance(node, Return) or self._distance(known) <= _MAX_JUMP
        ):
            return known
        position = self._lay_out(node)
        self._placed[node] = position
        return position

    def _lay_out(self, node: Node) -> int:
        match node:
            case Return():
                return self._emit(_RET, node.verdict)
            case Load():
                self._fall_into(self.place(node.then))
                if node.mask is not None:
                    self._emit(_AND, node.mask)
                return self._emit(_LD_ABS, node.offset)
            case Branch():
                then, other = self.place(node.then), self.place(node.other)
                # Checked only now: placing `other` may have pushed `then` out of reach.
                then, other = self._within_reach(then), self._within_reach(other)
                return self._emit(
                    node.op, node.k, jt=self._distance(then), jf=self._distance(other)
                )
            case _:
                assert_never(node)

    def _emit(self, code: int, k: int, *, jt: int = 0, jf: int = 0) -> int:
        self.reversed.append(struct.pack("<HBBI", code, jt, jf, k))
        return len(self.reversed) - 1

    def _distance(self, target: int) -> int:
        return len(self.reversed) - 1 - target

    def _fall_into(self, target: int) -> None:
        if self._distance(target):
            self._emit(_JA, self._distance(target))

    def _within_reach(self, target: int) -> int:
        distance = self._distance(target)
        return target if distance <= _MAX_JUMP else self._emit(_JA, distance)


def assemble(root: Node) -> bytes:
    """Lay ``root`` out as a packed array of ``struct sock_filter``, entered at its first one."""
    assembler = _Assembler()
    assembler.place(root)
    count = len(assembler.reversed)
    if count > _MAX_INSTRUCTIONS:
        msg = f"the filter has {count} instructions; the kernel accepts {_MAX_INSTRUCTIONS}"
        raise ValueError(msg)
    return b"".join(reversed(assembler.reversed))

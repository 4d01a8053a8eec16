"""A classic BPF machine as strict as the kernel's checker, to judge compiled filters."""

from __future__ import annotations

import struct
from typing import Final

ALLOW: Final = "allow"
EPERM: Final = "EPERM"
ENOSYS: Final = "ENOSYS"
EINVAL: Final = "EINVAL"
EPROTONOSUPPORT: Final = "EPROTONOSUPPORT"
SUCCESS: Final = "success"
VERDICTS: Final = {
    0x7FFF0000: ALLOW,
    0x00050000: SUCCESS,
    0x00050001: EPERM,
    0x00050016: EINVAL,
    0x00050026: ENOSYS,
    0x0005005D: EPROTONOSUPPORT,
}

Instruction = tuple[int, int, int, int]


def unpack(program: bytes) -> list[Instruction]:
    assert len(program) % 8 == 0
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    check(code)
    return code


def check(code: list[Instruction]) -> None:
    """What seccomp refuses to install: wild jumps, odd loads, no final return."""
    assert 0 < len(code) <= 4096
    assert code[-1][0] == 0x06, "must end in a return"
    for at, (op, jt, jf, k) in enumerate(code):
        assert op in {0x20, 0x54, 0x06, 0x05, 0x15, 0x35, 0x45}, f"opcode {op:#x} at {at}"
        if op == 0x20:
            assert k % 4 == 0, f"unaligned load at {at}"
            assert k < 64, f"load past seccomp_data at {at}"
        if op == 0x05:
            assert at + 1 + k < len(code), f"jump out at {at}"
        if op in {0x15, 0x35, 0x45}:
            assert at + 1 + max(jt, jf) < len(code), f"branch out at {at}"


def seccomp_data(nr: int, *, arch: int, args: tuple[int, ...] = ()) -> bytes:
    padded = (*args, *(0,) * (6 - len(args)))
    return struct.pack("<IIQ6Q", nr & 0xFFFFFFFF, arch, 0x7F00_0000_1000, *padded)


def execute(code: list[Instruction], data: bytes) -> tuple[int, int, bool]:
    """Return the value, the count of instructions run, and whether an argument was read."""
    accumulator = at = steps = 0
    looked = False
    while True:
        op, jt, jf, k = code[at]
        at += 1
        steps += 1
        if op == 0x06:
            return k, steps, looked
        if op == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
            looked = looked or k >= 8
        elif op == 0x54:
            accumulator &= k
        elif op == 0x05:
            at += k
        else:
            held = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += jt if held else jf


def verdict(code: list[Instruction], data: bytes) -> str:
    return VERDICTS[execute(code, data)[0]]

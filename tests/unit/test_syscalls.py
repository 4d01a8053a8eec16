from __future__ import annotations

import os
import re

import pytest

from union.sandbox._seccomp.syscalls import _TABLE, AUDIT_ARCH, MACHINES, NEWEST, numbers

HEADERS = {
    "x86_64": (
        "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
        "/usr/include/asm/unistd_64.h",
    ),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}


def from_headers(machine):
    path = next((path for path in HEADERS[machine] if os.path.exists(path)), None)
    if path is None:
        pytest.skip(f"no kernel headers for {machine}: install linux-libc-dev")
    with open(path, encoding="ascii") as header:
        text = header.read()
    return {
        name: int(number)
        for name, number in re.findall(
            r"^#define\s+__NR(?:3264)?_(\w+)\s+(\d+)\s*$", text, re.MULTILINE
        )
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_agree_with_the_kernel_headers(machine):
    header = from_headers(machine)
    ours = numbers(machine=machine)
    checked = {name: number for name, number in ours.items() if name in header}
    assert checked == {name: header[name] for name in checked}
    # What the headers lack must be younger than they are; what we lack must be absent there too.
    newest = max(number for name, number in header.items() if name != "syscalls" and number < 1024)
    assert all(number > newest for name, number in ours.items() if name not in header)
    assert not {name for name in _TABLE if name not in ours} & set(header)


def test_calls_since_the_common_numbering_agree_on_both_machines():
    x86, arm = (numbers(machine=machine) for machine in MACHINES)
    assert {name: n for name, n in x86.items() if n >= 424} == {
        name: n for name, n in arm.items() if n >= 424
    }


@pytest.mark.parametrize("machine", MACHINES)
def test_no_number_is_named_twice_or_lies_past_the_newest(machine):
    ours = numbers(machine=machine)
    assert len(set(ours.values())) == len(ours)
    assert max(ours.values()) <= NEWEST


def test_architecture_values_are_64_bit_and_little_endian():
    assert set(AUDIT_ARCH) == set(MACHINES)
    assert {word >> 30 for word in AUDIT_ARCH.values()} == {3}

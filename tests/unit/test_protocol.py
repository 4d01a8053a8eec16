"""The launcher's protocol in Python equals ``native/sbx.h``: names, numbers, structure sizes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from union.sandbox._linux import protocol
from union.sandbox._linux.framed_socket import HEAD
from union.sandbox._linux.machine import Machine
from union.sandbox._plan import layers, plan, template
from union.sandbox.on_device import _start_hook, _template_boot

if TYPE_CHECKING:
    from enum import IntEnum

NATIVE = Path(__file__).parents[2] / "native"
COMMENTS = re.compile(r"/\*.*?\*/", re.DOTALL)
ENUMS = re.compile(r"\benum\b\s*\w*\s*\{([^}]*)\}")
STRUCTS = re.compile(r"\bstruct\s+(\w+)\s*\{([^{}]*)\}\s*;")
SIZES = {"uint32_t": 4, "int32_t": 4, "uint64_t": 8}
FIRST_FAILURE_PLACE = 100

PREFIXES: dict[str, type[IntEnum]] = {
    "MAX_": protocol.Limit,
    "MSG_": protocol.Message,
    "PREPARE_": protocol.PrepareFlag,
    "EXEC_": protocol.ExecFlag,
}
STRUCTURES = {
    "simple_msg": protocol.SIMPLE,
    "prepare_msg": protocol.PREPARE,
    "exec_msg": protocol.EXEC,
    "exec_rlimit": protocol.RLIMIT,
    "exited_msg": protocol.EXITED,
    "connect_msg": protocol.CONNECT,
}
PORTABLE_STRUCTURES = {"begin_msg": protocol.BEGIN, "memory_msg": protocol.MEMORY}
STEPS = [
    step
    for step in (*vars(plan).values(), *vars(layers).values(), template.Template)
    if isinstance(step, type) and issubclass(step, plan.Step) and step.op
]
# The class of a step and its OP_* differ by more than their spelling.
SPELLED_OTHERWISE = {
    "SocketOption": "SOCKOPT",
    "LandlockCreate": "LL_CREATE",
    "LandlockPath": "LL_PATH",
    "LandlockRestrict": "LL_RESTRICT",
}


def source(name: str) -> str:
    return COMMENTS.sub("", (NATIVE / name).read_text(encoding="utf-8"))


def constants(text: str) -> dict[str, int]:
    """Return all members of all enums; each has a number, or the name of an earlier member."""
    found: dict[str, int] = {}
    for body in ENUMS.findall(text):
        for member in filter(None, (part.strip() for part in body.split(","))):
            name, value = (side.strip() for side in member.split("="))
            assert name not in found, f"{name} is defined twice"
            found[name] = found[value] if value in found else int(value, 0)
    return found


def layout(text: str, name: str) -> list[int]:
    """Return the sizes of a structure's members; all of them are integers of a fixed size."""
    body = dict(STRUCTS.findall(text))[name]
    sizes: list[int] = []
    for declaration in filter(None, (part.strip() for part in body.split(";"))):
        kind, names = declaration.split(None, 1)
        sizes += [SIZES[kind]] * len(names.split(","))
    return sizes


HEADER = source("sbx.h")
PORTABLE_HEADER = source("posix/posix.h")
CONSTANTS = constants(HEADER)


def with_prefix(prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): value
        for name, value in CONSTANTS.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("prefix", PREFIXES)
def test_enums_equal_those_of_the_header(prefix: str) -> None:
    members = {name: int(member) for name, member in PREFIXES[prefix].__members__.items()}
    assert members
    assert members == with_prefix(prefix)


def test_failure_places_equal_those_of_the_header() -> None:
    places = {n: v for n, v in with_prefix("OP_").items() if v >= FIRST_FAILURE_PLACE}
    assert {n: int(v) for n, v in protocol.FailurePlace.__members__.items()} == places


def test_plan_steps_equal_the_operations_of_the_header() -> None:
    steps = {SPELLED_OTHERWISE.get(step.__name__, step.__name__.upper()): step.op for step in STEPS}
    operations = {n: v for n, v in with_prefix("OP_").items() if v < FIRST_FAILURE_PLACE}
    assert operations.pop("LAST") == max(steps.values())
    assert steps == operations


def test_every_operation_has_a_name_of_its_own() -> None:
    numbers = {value for name, value in with_prefix("OP_").items() if name != "LAST"}
    assert set(protocol.FAILURE_NAMES) == numbers
    assert len(set(protocol.FAILURE_NAMES.values())) == len(numbers)


@pytest.mark.parametrize("name", [*STRUCTURES, *PORTABLE_STRUCTURES])
def test_structures_have_the_layout_of_the_header(name: str) -> None:
    structures = STRUCTURES | PORTABLE_STRUCTURES
    sizes = layout(HEADER if name in STRUCTURES else PORTABLE_HEADER, name)
    codes = re.findall(r"(\d*)([IiQ])", structures[name].format.removeprefix("="))
    expanded = [code for count, code in codes for _ in range(int(count or 1))]
    assert [{"I": 4, "i": 4, "Q": 8}[code] for code in expanded] == sizes
    # No padding on either side: each member is aligned to its size, and so is the whole.
    offset = 0
    for size in sizes:
        assert offset % size == 0
        offset += size
    assert offset % max(sizes) == 0
    assert structures[name].size == offset


def test_every_message_structure_of_the_header_has_a_counterpart() -> None:
    found = {name for name, _ in STRUCTS.findall(HEADER) if name.endswith(("_msg", "_rlimit"))}
    assert found == set(STRUCTURES)
    portable = {name for name, _ in STRUCTS.findall(PORTABLE_HEADER) if name.endswith("_msg")}
    assert portable == set(PORTABLE_STRUCTURES)
    assert layout(PORTABLE_HEADER, "frame") == [4, 4]
    assert HEAD.size == 8


def test_fixed_descriptors_equal_those_of_the_header_and_of_the_start_hook() -> None:
    wanted = (CONSTANTS["WAIT_FD"], CONSTANTS["SLOT_FD"])
    assert wanted == (protocol.WAIT_FD, protocol.SLOT_FD)
    # The hook is copied into the sandbox, where it cannot import the module.
    assert wanted == (_start_hook.WAIT_FD, _start_hook.SLOT_FD)


def test_descriptors_of_a_template_equal_those_of_its_boot_code() -> None:
    boot = _template_boot
    assert with_prefix("TEMPLATE_") == {
        "LAUNCHER": boot.LAUNCHER_FD,
        "HOST": boot.HOST_FD,
        "PROC": boot.PROC_FD,
        "OUTPUT": boot.OUTPUT_FD,
    }


def test_constants_of_the_plan_s_encoding_equal_those_in_c() -> None:
    magic = re.search(r"\bMAGIC = (0x\w+)", source("plan.c"))
    assert magic is not None
    assert int(magic[1], 16) == plan.MAGIC
    assert CONSTANTS["WRAP_USERNS"] == plan.WRAP_USERNS
    shift = re.search(r"#define BIND_EXISTING \(UINT64_C\(1\) << (\d+)\)", HEADER)
    assert shift is not None
    assert 1 << int(shift[1]) == plan.BIND_EXISTING


def test_no_constant_of_the_header_is_left_out() -> None:
    prefixes = (*PREFIXES, "OP_")
    rest = {name for name in CONSTANTS if not name.startswith(prefixes)}
    codes = {"EXIT_LAUNCHER", "EXIT_SANDBOX", "EXIT_NOT_EXECUTED"}  # never sent to the host
    plans = {"WRAP_USERNS", "MEDIATE_CONNECT"}
    # Used between the files of the launcher only.
    own = ("MEDIATED_", "TIMES_", "UNIX_PATH_", "TEMPLATE_", "FORK_")
    calls = {name for name in rest if name.startswith(own)}
    joins = {name for name in rest if name.startswith("JOIN_")} | {"NJOINED"}
    assert len(joins) == CONSTANTS["NJOINED"] + 1 == Machine.DESCRIPTORS
    assert rest == {"WAIT_FD", "SLOT_FD"} | plans | codes | calls | joins


def test_the_parser_finds_a_difference() -> None:
    """The control: a number or a size that changes in the header is seen."""
    assert constants(HEADER.replace("MSG_KILL = 11", "MSG_KILL = 13"))["MSG_KILL"] == 13
    wider = HEADER.replace("struct simple_msg { uint32_t type", "struct simple_msg { uint64_t type")
    assert layout(wider, "simple_msg") != layout(HEADER, "simple_msg")

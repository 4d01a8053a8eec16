"""The launch document: round trip, and refusal of everything that is not one."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._wire.launch import LaunchSpec
from union.sandbox.errors import SandboxUsageError

SPEC = LaunchSpec(
    session="ab" * 16,
    session_arguments={"network_mode": "blocked"},
    owner_sha256="0" * 64,
    guest_sha256="1" * 64,
    expires=1e9,
)
REQUIRED = ("session", "session_arguments", "owner_sha256", "guest_sha256", "expires")
number = st.floats(allow_nan=False, allow_infinity=False)


def document(**changes: Any) -> bytes:
    return json.dumps({**json.loads(SPEC.encode()), **changes}).encode() + b"\n"


@given(
    st.builds(
        LaunchSpec,
        session=st.text(),
        session_arguments=st.dictionaries(st.text(), st.none() | st.text() | st.integers()),
        owner_sha256=st.text(),
        guest_sha256=st.text(),
        expires=number,
        shown_at=st.none() | st.text(),
        home=st.none() | st.text(),
        owner_lease=st.none() | st.tuples(number, number),
        owner_socket=st.none() | st.integers(),
    )
)
def test_a_launch_document_round_trips(spec: LaunchSpec):
    line = spec.encode()
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert LaunchSpec.decode(line) == spec


def test_optional_fields_may_be_missing():
    fields = {name: getattr(SPEC, name) for name in REQUIRED}
    assert LaunchSpec.decode(json.dumps(fields).encode()) == SPEC


def test_unknown_fields_are_refused():
    with pytest.raises(SandboxUsageError, match="unknown field 'other'") as caught:
        LaunchSpec.decode(document(other=1))
    assert "same version" in caught.value.hint


@pytest.mark.parametrize("name", REQUIRED)
def test_required_fields_must_be_present(name: str):
    fields = json.loads(SPEC.encode())
    del fields[name]
    with pytest.raises(SandboxUsageError, match=f"no field '{name}'"):
        LaunchSpec.decode(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "name, value",
    [
        ("session", None),
        ("session", 5),
        ("session_arguments", []),
        ("session_arguments", None),
        ("owner_sha256", 5),
        ("guest_sha256", None),
        ("expires", "soon"),
        ("expires", True),
        ("expires", None),
        ("shown_at", 1),
        ("home", ["/"]),
        ("owner_lease", 1),
        ("owner_lease", [1]),
        ("owner_lease", [1, 2, 3]),
        ("owner_lease", ["a", "b"]),
        ("owner_lease", "no"),
        ("owner_socket", "5"),
        ("owner_socket", 5.0),
        ("owner_socket", True),
    ],
)
def test_fields_of_the_wrong_type_are_refused(name: str, value: object):
    with pytest.raises(SandboxUsageError, match=f"field '{name}' of the launch document must be"):
        LaunchSpec.decode(document(**{name: value}))


@pytest.mark.parametrize("line", [b"", b"no\n", b"[]\n", b"5\n", b'"x"\n', b"\xff\n"])
def test_other_data_is_refused(line: bytes):
    with pytest.raises(SandboxUsageError, match="launch document"):
        LaunchSpec.decode(line)


def test_every_field_is_part_of_the_document():
    names = {field.name for field in dataclasses.fields(LaunchSpec)}
    assert set(json.loads(SPEC.encode())) == names

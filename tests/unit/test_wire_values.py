"""Specs, events and errors: encoding and decoding round trip, or are refused."""

from __future__ import annotations

import contextlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union import sandbox as sb
from union.sandbox import errors
from union.sandbox._core import file_errors
from union.sandbox._core.events import Exited, Failed, Started, Usage
from union.sandbox._core.files import FileInfo
from union.sandbox._core.isolation import Isolation
from union.sandbox._core.resolve import resolve_run, resolve_session
from union.sandbox._policy.decision import Decision
from union.sandbox._wire import values
from union.sandbox._wire.errors import decode_error, encode_error
from union.sandbox._wire.frames import WireError, parse_json, to_json

BACKENDS = ("userns", "none")
SESSIONS = [
    {},
    {"network_mode": "open", "network_denylist": ["10.0.0.0/8", "*.bad.example"]},
    {"network_mode": "allowlist", "network_allowlist": ["example.com", "[2001:db8::1]:80"]},
    {"network_denylist": ["10.0.0.0/8"], "network_proxy_url": "http://p:1"},
    {"network_mode": "blocked"},
    {"timeout_s": 5, "env": {"A": "1", "B": "\udcff"}, "strict": True, "warm": 3},
    {"read_only_paths": ["/opt/x"], "read_write_paths": ["/srv/y"], "host_work_dir": "/srv/w"},
    {"resources": sb.Resources(cpu=0.5, memory="64Mi", processes=9), "preload": ["json"]},
    {"persist": "machine"},
    {
        "network_mode": "open",
        "network_proxy_url": "http://p:1",
        "network_socks_url": "socks5://s:2",
    },
]
RUNS = [
    {"cmd": "echo hi"},
    {"cmd": ["ls", "a b", "\udcfe"], "stdout": sb.PIPE, "stderr": sb.DEVNULL},
    {"cmd": "print(1)", "script_type": "python", "env": {"X": "y"}, "cwd": "sub", "timeout_s": 2.5},
    {"cmd": "cat", "stdin": b"\x00\xff" * 10, "background": True},
    {"cmd": "cat", "stdin": sb.PIPE, "network_mode": "blocked"},
    {"cmd": "vi", "pty": (30, 100), "stdin": sb.PIPE, "stdout": sb.PIPE},
    {"cmd": "x", "network_mode": "allowlist", "network_allowlist": ["example.com"]},
]


def session(**options):
    return resolve_session(backend="userns", backends=BACKENDS, **options)


@pytest.mark.parametrize("options", SESSIONS)
def test_a_session_round_trip(options):
    spec = session(**options)
    payload = parse_json(to_json(values.encode_session(spec)))
    assert values.decode_session(payload, backends=BACKENDS, default_backend="none") == spec


@pytest.mark.parametrize("options", SESSIONS[:4])
@pytest.mark.parametrize("arguments", RUNS)
def test_a_run_round_trip(options, arguments):
    base = session(env={"S": "1"}, **options)
    spec = resolve_run(base, **arguments)
    found = values.decode_run(values.encode_run(spec, base), base)
    assert found == spec


@pytest.mark.spec("I3")
@given(st.binary(max_size=300))
def test_any_bytes_decode_to_a_run_or_are_refused(body):
    with contextlib.suppress(WireError, errors.SandboxUsageError):
        values.decode_run(body, session())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@pytest.mark.slow
@pytest.mark.spec("I3")
@given(st.dictionaries(st.sampled_from(sorted(values._RUN)), JSON))
def test_any_arguments_decode_to_a_run_or_are_refused(payload):
    head = to_json({"kind": "shell", **payload})
    body = values._SIZES.pack(len(head), 4) + head + b"true"
    with contextlib.suppress(WireError, errors.SandboxUsageError):
        values.decode_run(body, session())


@pytest.mark.slow
@pytest.mark.spec("I3")
@given(st.dictionaries(st.sampled_from([*sorted(values._SESSION), "other"]), JSON))
def test_any_arguments_decode_to_a_session_or_are_refused(payload):
    with contextlib.suppress(WireError, errors.SandboxUsageError):
        values.decode_session(payload, backends=BACKENDS, default_backend="userns")


@pytest.mark.slow
@pytest.mark.spec("I3")
@given(
    st.sampled_from(["started", "exited", "failed", "decision", "refused", "x"]),
    st.dictionaries(
        st.sampled_from(["pid", "returncode", "reason", "usage", "stage", "host"]), JSON
    ),
)
def test_any_event_decodes_or_is_refused(name, value):
    with contextlib.suppress(WireError):
        values.decode_event(to_json({name: value}))


def test_events_round_trip():
    usage = Usage(cpu_user_s=0.5, cpu_system_s=0.25, max_rss_bytes=7, peak_memory_bytes=8)
    for event in (Exited(3, "timeout", usage), Failed("spawn", "why", "code", "hint")):
        assert values.decode_event(values.encode_event(event))[1] == event
    name, (event, isolation) = values.decode_event(values.encode_event(Started(5)))
    assert (name, event, isolation) == ("started", Started(5), None)
    report = Isolation(backend="userns", namespaces=("user",), limits=(("tmp", "tmpfs"),))
    _, (_, payload) = values.decode_event(values.encode_started(Started(5), report))
    assert values.decode_isolation(payload) == report


def test_a_decision_round_trip():
    decision = Decision(
        time=1.5, door="tcp", host="h", address="a", port=1, allowed=True, rule="r", reason="w"
    )
    assert values.decode_event(values.encode_decision(decision)) == ("decision", decision)


def test_a_file_round_trip():
    info = FileInfo(path="a/\udcff", kind="symlink", size=3, mode=0o644, mtime=1.25)
    assert values.decode_file(parse_json(to_json(values.encode_file(info)))) == info
    for wrong in (None, {}, {**values.encode_file(info), "kind": "door"}):
        with pytest.raises(WireError):
            values.decode_file(wrong)


ERRORS = [
    errors.SandboxUsageError("m", argument="a", hint="h", code="c"),
    errors.PolicyError("m", argument="a"),
    errors.SessionClosedError("m"),
    errors.BackendUnavailableError("m", backend="b", missing=("x", "y"), hint="h"),
    errors.SandboxExecutionError("m", backend="b", stage="plan", code="c"),
    file_errors.SandboxPathError("m", path="p", argument="a"),
    *(
        kind("m", path="p\udcff", number=17)
        for kind in (
            file_errors.SandboxFileError,
            file_errors.SandboxFileNotFoundError,
            file_errors.SandboxFileExistsError,
            file_errors.SandboxIsADirectoryError,
            file_errors.SandboxNotADirectoryError,
            file_errors.SandboxNotRegularError,
            file_errors.SandboxFileAccessError,
            file_errors.SandboxFileTooLargeError,
        )
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_an_error_round_trip(error):
    found = decode_error(parse_json(to_json(encode_error(error))))
    assert type(found) is type(error)
    assert (found.args, found.code, found.hint) == (error.args, error.code, error.hint)
    assert vars(found) == vars(error)
    if isinstance(error, OSError):
        assert (found.errno, found.filename) == (error.errno, error.filename)
    assert str(pickle.loads(pickle.dumps(found))) == str(error)


@pytest.mark.slow
@pytest.mark.spec("I3")
@given(
    st.dictionaries(st.sampled_from(["type", "message", "code", "hint", "missing", "number"]), JSON)
)
def test_any_payload_decodes_to_an_error(payload):
    assert isinstance(decode_error(payload), errors.SandboxError)


def test_an_unknown_error_becomes_an_execution_error():
    assert type(decode_error({"type": "Strange", "message": "m"})) is errors.SandboxExecutionError


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"backend": 1},
        {"backend": "x", "root": []},
        {"backend": "x", "landlock_abi": {}},
        {"backend": "x", "capabilities": "all"},
        {"backend": "x", "no_new_privs": 1},
    ],
)
def test_a_report_with_wrong_types_is_refused(payload):
    with pytest.raises(WireError):
        values.decode_isolation(payload)

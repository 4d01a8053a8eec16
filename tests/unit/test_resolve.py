from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox import constants
from union.sandbox._core.resolve import (
    resolve_run,
    resolve_session,
    validate_output_cap,
    validate_timeout,
)
from union.sandbox._core.spec import NetworkSpec, SessionSpec
from union.sandbox.constants import DEVNULL, INHERIT, PIPE
from union.sandbox.errors import PolicyError, SandboxUsageError

BACKENDS = ("userns", "none")
SESSION = SessionSpec(backend="userns")


def session(**options: object) -> SessionSpec:
    return resolve_session(**{"backend": "userns", "backends": BACKENDS, **options})


def test_a_session_without_arguments_has_the_defaults():
    assert session() == SessionSpec(backend="userns")
    assert session().network == NetworkSpec(mode="blocked")


def test_a_run_without_arguments_has_the_defaults():
    spec = resolve_run(SESSION, "echo hi")
    assert (spec.kind, spec.text, spec.cmd) == ("shell", "echo hi", "echo hi")
    assert (spec.stdout, spec.stderr, spec.stdin) == ("collect", "collect", None)
    assert (spec.env, spec.cwd, spec.timeout_s, spec.background) == ((), None, None, False)
    assert spec.max_output_bytes == constants.MAX_OUTPUT_BYTES


@pytest.mark.parametrize(
    "value, window",
    [(False, None), (None, None), (True, (24, 80)), ((5, 6), (5, 6)), ([5, 6], (5, 6))],
)
def test_a_terminal_has_a_window_and_one_output(value, window):
    spec = resolve_run(SESSION, "x", pty=value)
    assert spec.pty == window
    assert spec.stderr == ("collect" if window is None else "devnull")


@pytest.mark.parametrize(
    "value, mode",
    [
        (None, "collect"),
        (True, "pipe"),
        (PIPE, "pipe"),
        (False, "devnull"),
        (DEVNULL, "devnull"),
        (INHERIT, "inherit"),
    ],
)
def test_streams(value, mode):
    assert resolve_run(SESSION, "x", stdout=value).stdout == mode
    assert resolve_run(SESSION, "x", stderr=value).stderr == mode


@pytest.mark.parametrize(
    "value, mode",
    [
        (None, None),
        (False, None),
        (DEVNULL, None),
        (True, "pipe"),
        (PIPE, "pipe"),
        (b"x", b"x"),
        (b"", b""),
        (bytearray(b"y"), b"y"),
        (memoryview(b"z"), b"z"),
    ],
)
def test_stdin(value, mode):
    assert resolve_run(SESSION, "x", stdin=value).stdin == mode


@pytest.mark.parametrize("value", ["pipe", 0, 1, -1, "", b"", object(), "PIPE"])
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_other_stream_values(name, value):
    with pytest.raises(SandboxUsageError, match=f"{name} must be True, False, PIPE") as caught:
        resolve_run(SESSION, "x", **{name: value})
    assert caught.value.argument == name


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_any_text_that_is_not_blank_is_a_command(text):
    if text.strip():
        assert resolve_run(SESSION, text).text == text
    else:
        with pytest.raises(SandboxUsageError, match="cmd"):
            resolve_run(SESSION, text)


def test_python_is_dedented_and_shell_is_not():
    text = "\n    if x:\n        y\n"
    assert resolve_run(SESSION, text, script_type="python").text == "\nif x:\n    y\n"
    assert resolve_run(SESSION, text).text == text


@pytest.mark.parametrize("text", ["x = '''\n   \n'''\n", "\n \nif x:\n  y\n", "# a\n  b\n", "x"])
def test_python_that_begins_at_the_margin_is_left_as_it_is(text):
    assert resolve_run(SESSION, text, script_type="python").text == text


def test_a_list_becomes_an_argv():
    spec = resolve_run(SESSION, ["a", "", "b c"])
    assert (spec.kind, spec.argv, spec.cmd) == ("argv", ("a", "", "b c"), ("a", "", "b c"))
    with pytest.raises(SandboxUsageError, match="source text"):
        resolve_run(SESSION, ["a"], script_type="python")


def test_one_argument_may_be_as_long_as_the_kernel_takes():
    longest = "x" * (128 * 1024 - 1)
    assert resolve_run(SESSION, ["a", longest]).argv[1] == longest
    with pytest.raises(SandboxUsageError, match="131071") as caught:
        resolve_run(SESSION, ["a", longest + "x"])
    assert caught.value.hint


def test_bytes_that_are_not_utf8_travel_as_surrogates():
    raw = b"\xff".decode("utf-8", "surrogateescape")
    assert resolve_run(SESSION, ["a", raw], env={"A": raw}).env == (("A", raw),)
    for options in ({"env": {"A": "\ud800"}}, {"cwd": "\ud800"}):
        with pytest.raises(SandboxUsageError):
            resolve_run(SESSION, "x", **options)
    with pytest.raises(SandboxUsageError, match="cmd"):
        resolve_run(SESSION, "\ud800")


def test_the_calls_environment_wins():
    spec = resolve_run(session(env={"A": "1", "B": "1"}), "x", env={"B": "2", "C": "2"})
    assert dict(spec.env) == {"A": "1", "B": "2", "C": "2"}


def test_an_environment_has_a_size():
    assert session(env={f"N{n}": "x" * 100_000 for n in range(10)})
    with pytest.raises(SandboxUsageError, match="env has") as caught:
        session(env={f"N{n}": "x" * 100_000 for n in range(11)})
    assert "put_bytes" in caught.value.hint


@pytest.mark.parametrize("value, settled", [(None, None), (1, 1.0), (0.001, 0.001), (10**9, 1e9)])
def test_timeouts(value, settled):
    assert validate_timeout("timeout_s", value) == settled
    assert session(timeout_s=value).timeout_s == settled
    assert resolve_run(SESSION, "x", timeout_s=value).timeout_s == settled


@pytest.mark.parametrize("value", [0, -1, -0.0, math.nan, math.inf, -math.inf, "1", True, [], 1j])
def test_wrong_timeouts(value):
    with pytest.raises(SandboxUsageError, match="timeout_s must be a") as caught:
        session(timeout_s=value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [10**400, 1e308])
def test_an_absurd_timeout_is_an_answer_not_a_crash(value):
    try:
        assert validate_timeout("timeout_s", value) == float(value)
    except SandboxUsageError as exc:
        assert exc.argument == "timeout_s"  # noqa: PT017 - either answer is one


@pytest.mark.parametrize("value, settled", [(None, constants.MAX_OUTPUT_BYTES), (0, 0), (7, 7)])
def test_output_caps(value, settled):
    assert validate_output_cap(value) == settled


@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_wrong_output_caps(value):
    with pytest.raises(SandboxUsageError, match="max_output_bytes"):
        validate_output_cap(value)


def test_a_long_value_is_shown_short():
    with pytest.raises(SandboxUsageError) as caught:
        resolve_run(SESSION, "x", script_type="y" * 10_000)
    assert len(str(caught.value)) < 300


def test_the_backend_is_one_of_those_that_exist():
    with pytest.raises(SandboxUsageError, match="one of 'userns', 'none', not 'docker'"):
        session(backend="docker")


def test_network_of_a_call():
    own = session(
        network_mode="allowlist", network_allowlist=["a.example"], network_denylist=["b.example"]
    )
    assert resolve_run(own, "x").network == own.network
    assert resolve_run(own, "x", network_mode="allowlist").network == own.network
    assert resolve_run(own, "x", network_mode="blocked").network == NetworkSpec()
    for options, argument in (
        ({"network_mode": "open"}, "network_mode"),
        ({"network_allowlist": ["c.example"]}, "network_allowlist"),
    ):
        with pytest.raises(PolicyError) as caught:
            resolve_run(own, "x", **options)
        assert caught.value.argument == argument
    other = resolve_run(own, "x", network_allowlist=["a.example:443"]).network
    assert (other.mode, len(other.allow), other.deny) == ("allowlist", 1, own.network.deny)
    assert other.allow != own.network.allow


@pytest.mark.spec("C9")
@pytest.mark.threat(172)
def test_a_session_without_a_mode_is_no_ceiling():
    own = session(
        network_denylist=["b.example"],
        network_proxy_url="http://p.example",
        network_socks_url="socks5://s.example",
    )
    assert (own.network.mode, own.network_is_ceiling) == ("blocked", False)
    assert resolve_run(own, "x").network == own.network
    for options in (
        {"network_mode": "open"},
        {"network_mode": "allowlist", "network_allowlist": ["c.example"]},
    ):
        asked = resolve_run(own, "x", **options).network
        assert asked.mode == options["network_mode"]
        assert (asked.deny, asked.proxy_url) == (own.network.deny, "http://p.example")
    fixed = session(network_mode="blocked")
    assert fixed.network_is_ceiling
    with pytest.raises(PolicyError, match="wider than the session"):
        resolve_run(fixed, "x", network_mode="open")


@pytest.mark.threat(174)
@pytest.mark.parametrize(
    "options, argument",
    [
        ({"network_mode": "allowlist", "network_allowlist": ["a.example"]}, "network_allowlist"),
        ({"network_mode": "allowlist", "network_allowlist": []}, "network_allowlist"),
        ({"network_mode": "open", "network_denylist": ["a.example"]}, "network_denylist"),
        ({"network_denylist": ["a.example"]}, "network_denylist"),
    ],
)
def test_a_backend_that_isolates_nothing_refuses_lists(options, argument):
    """The control is the same session of a backend that enforces them."""
    session(**options)
    with pytest.raises(PolicyError, match="cannot be enforced") as caught:
        session(backend="none", **options)
    assert caught.value.argument == argument
    if set(options) <= {"network_mode", "network_allowlist"}:
        resolve_run(session(), "x", **options)
        with pytest.raises(PolicyError, match="cannot be enforced"):
            resolve_run(session(backend="none"), "x", **options)
    resolve_run(session(backend="none"), "x", network_mode="open")


@pytest.mark.parametrize(
    "options, argument",
    [
        ({"network_mode": "allowlist"}, "network_allowlist"),
        ({"network_allowlist": []}, "network_allowlist"),
        ({"network_mode": "open", "network_allowlist": []}, "network_allowlist"),
        *(
            ({"network_mode": "blocked", argument: value}, argument)
            for argument, value in (
                ("network_denylist", []),
                ("network_proxy_url", "http://p.example"),
                ("network_socks_url", "socks5://p.example"),
            )
        ),
        ({"network_mode": "open", "network_proxy_url": "socks5://p.example"}, "network_proxy_url"),
        ({"network_mode": "open", "network_socks_url": 5}, "network_socks_url"),
    ],
)
def test_network_arguments_that_contradict(options, argument):
    with pytest.raises(PolicyError, match=argument) as caught:
        session(**options)
    assert caught.value.argument == argument


def test_paths_are_absolute_and_a_list():
    assert session(read_only_paths=["/a"], read_write_paths=("/b",)).read_only_paths == ("/a",)
    for value in ("/a", b"/a", ["a"], [b"/a"], [""], {"/a"}, None):
        with pytest.raises(SandboxUsageError, match="read_only_paths"):
            session(read_only_paths=value)

"""Profiles for macOS: exactly as agreed, closed by default, and no path can add a rule.

None of this has been run on macOS; the golden files are what was meant.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union import sandbox as sb
from union.sandbox._backends.sandbox_exec import unavailable
from union.sandbox._plan import seatbelt

GOLDEN = Path(__file__).parent / "profiles"
POSTURES = {
    "blocked": {"network": "blocked"},
    "open": {"network": "open"},
    "allowlist": {"network": "filtered", "proxy_ports": (3128, 1080)},
}

Form = list["Form | str"]


def profile(**changes: object) -> str:
    fields = {
        "work_dir": "/private/var/folders/ab/T/work",
        "scratch": "/private/var/folders/ab/T/scratch",
        "read_only": ("/opt/homebrew/Cellar/python@3.12", "/Users/me/my data"),
        "read_write": ("/Users/me/out",),
        "network": "blocked",
        **changes,
    }
    return seatbelt.profile(**fields)  # type: ignore[arg-type]  # fields of the test


def forms(text: str) -> list[Form]:
    """Reads a profile as the language is read: lists, words and quoted strings."""
    stack: list[Form] = [[]]
    at = 0
    while at < len(text):
        char = text[at]
        if char == "(":
            stack.append([])
        elif char == ")":
            done = stack.pop()
            stack[-1].append(done)
        elif char == '"':
            word = '"'
            at += 1
            while text[at] != '"':
                at += text[at] == "\\"
                word += text[at]
                at += 1
            stack[-1].append(word)
        elif not char.isspace():
            end = at
            while end < len(text) and text[end] not in '()" \n':
                end += 1
            stack[-1].append(text[at:end])
            at = end - 1
        at += 1
    assert len(stack) == 1
    return stack[0]  # type: ignore[return-value]  # the top holds forms alone


@pytest.mark.spec("G1")
@pytest.mark.parametrize("name", POSTURES)
def test_the_profile_is_the_golden_one(name: str) -> None:
    assert profile(**POSTURES[name]) == (GOLDEN / f"{name}.sb").read_text(encoding="utf-8")


@pytest.mark.spec("G1")
@pytest.mark.parametrize("name", POSTURES)
def test_everything_is_denied_by_default(name: str) -> None:
    rules = forms(profile(**POSTURES[name]))
    assert rules[:2] == [["version", "1"], ["deny", "default"]]
    written = [rule for rule in rules if "file-write*" in rule]
    assert [target[1] for target in written[0][3:]] == [
        '"/private/var/folders/ab/T/work',
        '"/private/var/folders/ab/T/scratch',
        '"/Users/me/out',
    ]
    assert len(written) == 1
    assert not any("default" in rule[1:] for rule in rules if rule[0] == "allow")
    readable = [target[1] for rule in rules if "file-read*" in rule for target in rule[2:]]
    assert '"/Users' not in readable
    assert '"/Users/me' not in readable


@pytest.mark.spec("G1", "F3")
def test_the_network_follows_the_mode() -> None:
    def network(name: str) -> list[Form]:
        found = forms(profile(**POSTURES[name]))
        return [rule for rule in found if any("network" in str(word) for word in rule[:3])]

    assert network("blocked") == [["deny", "network*"]]
    assert network("open") == [["allow", "network*", "system-socket"]]
    assert network("allowlist") == [
        ["allow", "network-outbound"]
        + [["remote", "ip", f'"localhost:{port}'] for port in (3128, 1080)]
    ]
    assert profile(network="filtered") == profile(network="blocked"), "no listener, no way out"


@pytest.mark.spec("G1")
@given(st.text(min_size=1))
def test_no_path_can_add_a_rule(name: str) -> None:
    path = f"/Users/me/{name}"
    plain = forms(profile())
    try:
        found = forms(profile(work_dir=path))
    except sb.PolicyError:
        assert not path.isprintable()
        return
    assert [rule[:2] for rule in found] == [rule[:2] for rule in plain]
    written = next(rule for rule in found if "file-write*" in rule)
    assert written[3] == ["subpath", '"' + path]


def test_an_attack_by_name_is_quoted() -> None:
    evil = '/tmp/") (allow default) ("'
    assert forms(profile(work_dir=evil))[1] == ["deny", "default"]
    assert all(rule != ["allow", "default"] for rule in forms(profile(work_dir=evil)))


@pytest.mark.spec("G1")
def test_the_command_is_run_by_sandbox_exec() -> None:
    assert seatbelt.command("/p/profile.sb", ("-x", "a b")) == (
        "/usr/bin/sandbox-exec",
        "-f",
        "/p/profile.sb",
        "--",
        "-x",
        "a b",
    )


@pytest.mark.spec("G1")
async def test_on_linux_it_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(sb.BackendUnavailableError, match="part of macOS, and this is Linux") as got:
        await sb.on_device.session(backend="sandbox-exec").open()
    assert (got.value.backend, got.value.code) == ("sandbox-exec", "backend-unavailable")
    assert "backend='userns'" in got.value.hint


@pytest.mark.spec("G1")
def test_on_macos_the_error_names_the_missing_launcher() -> None:
    error = unavailable("Darwin")
    assert "not ported to macOS yet" in str(error)
    assert "Linux container" in error.hint

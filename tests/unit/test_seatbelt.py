"""Profiles for macOS: exactly as agreed, closed by default, and no path can add a rule.

The profiles are judged by ``tests/portable/sbpl.py``, which refuses what it does not know. None of
this has run on macOS; ``scripts/check_mac.py`` runs the contract suite on one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.portable.sbpl import Policy, ProfileError

from union import sandbox as sb
from union.sandbox._plan import seatbelt

GOLDEN = Path(__file__).parent / "profiles"
HOME = "/Users/me"
WORK = "/private/var/tmp/sandbox-1-w"
SECRET = f"{HOME}/.ssh/id_ed25519"
LABEL = "union.sandbox.run.0f"
PYTHON = "/opt/homebrew/Cellar/python@3.13"
POSTURES: dict[str, dict[str, Any]] = {
    "blocked": {"network": "blocked"},
    "open": {"network": "open"},
    "allowlist": {"network": "filtered", "proxy_ports": (50123, 50124)},
    "terminal": {"network": "blocked", "terminal": "/dev/ttys004"},
}


def profile(**changes: Any) -> seatbelt.Profile:
    fields = {
        "label": LABEL,
        "work_dir": WORK,
        "tmp": "/private/var/tmp/sandbox-1-s/1/tmp",
        "read_only": (PYTHON, f"{HOME}/my data"),
        "read_only_files": (f"{HOME}/.local/bin/uv",),
        "network": "blocked",
        **changes,
    }
    return seatbelt.profile(**fields)


@pytest.fixture(autouse=True)
def paths_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths here are those of a Mac, not of this machine: none of them is a link."""
    monkeypatch.setattr(os.path, "realpath", lambda path, **_: path)


def policy(without: tuple[str, ...] = (), **changes: Any) -> Policy:
    made = profile(**changes)
    return Policy(made.text, made.parameters, without=frozenset(without))


@pytest.mark.spec("G1")
@pytest.mark.parametrize("name", POSTURES)
def test_the_profile_is_the_golden_one(name: str) -> None:
    assert profile(**POSTURES[name]).text == (GOLDEN / f"{name}.sb").read_text(encoding="utf-8")


def mach(name: str) -> dict[str, str]:
    return {"global-name": name}


ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "read a secret": ("file-read-data", {"path": SECRET}),
    "look at a secret": ("file-read-metadata", {"path": SECRET}),
    "learn that a file exists": ("file-test-existence", {"path": SECRET}),
    "list the home directory": ("file-read-data", {"path": HOME}),
    "clone an unreadable file": ("file-clone", {"path": SECRET}),
    "link an unreadable file": ("file-link", {"path": SECRET}),
    "write beside the work dir": ("file-write-create", {"path": WORK + "-not"}),
    "write to /private/tmp": ("file-write-create", {"path": "/private/tmp/x"}),
    "write the interpreter": ("file-write-data", {"path": f"{PYTHON}/x"}),
    "read the caller's terminal": ("file-read-data", {"path": "/dev/ttys000"}),
    "type into the caller's terminal": ("file-ioctl", {"path": "/dev/ttys000"}),
    "inspect other processes": ("process-info-pidinfo", {"target": "others"}),
    "signal other processes": ("signal", {"target": "others"}),
    "read arguments of others": ("sysctl-read", {"sysctl-name": "kern.procargs2.1"}),
    "list all processes": ("sysctl-read", {"sysctl-name": "kern.proc.all"}),
    "have another run's label": ("mach-lookup", mach("union.sandbox.run.0e")),
    "start programs outside": ("mach-lookup", mach("com.apple.coreservices.launchservicesd")),
    "send AppleEvents": ("appleevent-send", {}),
    "read the keychain": ("mach-lookup", mach("com.apple.SecurityServer")),
    "read preferences": ("mach-lookup", mach("com.apple.cfprefsd.agent")),
    "read the pasteboard": ("mach-lookup", mach("com.apple.pasteboard.1")),
    "map another program's memory": ("ipc-posix-shm-read-data", {"ipc-posix-name": "com.other"}),
    "read the serial number": ("iokit-get-properties", {}),
    "read the firmware's variables": ("nvram-get", {}),
    "create a launchd job": ("job-creation", {}),
    "connect to loopback": ("network-outbound", {"remote": ("127.0.0.1", 80)}),
    "connect to the internet": ("network-outbound", {"remote": ("93.184.216.34", 443)}),
    "listen": ("network-bind", {"local": ("127.0.0.1", 80)}),
    "use a socket of the host": ("network-outbound", {"path": "/private/var/run/docker.sock"}),
    "ask the resolver": ("network-outbound", {"path": "/private/var/run/mDNSResponder"}),
    "set an access list": ("file-write-acl", {"path": f"{WORK}/x"}),
    "make a file immutable": ("file-write-flags", {"path": f"{WORK}/x"}),
    "make a program set-id": ("file-write-setugid", {"path": f"{WORK}/x"}),
}
NEEDS: dict[str, tuple[str, dict[str, Any]]] = {
    "have its label": ("mach-lookup", mach(LABEL)),
    "signal its children": ("signal", {"target": "same-sandbox"}),
    "load a library of a wheel": ("file-map-executable", {"path": f"{WORK}/.venv/lib/x.so"}),
    "clone its own file": ("file-clone", {"path": f"{WORK}/x"}),
    "connect to its own socket": ("network-outbound", {"path": f"{WORK}/s"}),
    "use its own terminal": (
        "file-ioctl",
        {"path": "/dev/ttys004", "extensions": ("com.apple.sandbox.pty",)},
    ),
    "resolve paths": ("file-read-metadata", {"path": HOME}),
    "run uv": ("file-read-data", {"path": f"{HOME}/.local/bin/uv"}),
    "write its files": ("file-write-create", {"path": f"{WORK}/x"}),
}


@pytest.mark.spec("G1")
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused(attack: str) -> None:
    operation, facts = ATTACKS[attack]
    assert not policy().allows(operation, **facts)


@pytest.mark.spec("G1")
@pytest.mark.parametrize("need", NEEDS)
def test_what_a_command_needs_is_allowed(need: str) -> None:
    """The control: a judge that refuses everything would pass the attacks."""
    operation, facts = NEEDS[need]
    assert policy().allows(operation, **facts)


def test_the_judge_finds_each_operation_that_version_1_allows_by_default() -> None:
    bare = Policy("(version 1)(deny default)", {})
    assert bare.allows("file-clone", path=SECRET)
    assert bare.allows("process-info-pidinfo", target="others")
    assert not bare.allows("file-read-data", path=SECRET)


@pytest.mark.spec("G1", "F3")
def test_the_network_follows_the_mode() -> None:
    filtered = policy(**POSTURES["allowlist"])
    assert filtered.allows("network-outbound", remote=("127.0.0.1", 50123))
    assert not filtered.allows("network-outbound", remote=("127.0.0.1", 50125))
    assert not filtered.allows("network-outbound", remote=("93.184.216.34", 50123))
    opened = policy(network="open")
    assert opened.allows("network-outbound", remote=("93.184.216.34", 443))
    assert opened.allows("network-outbound", path="/private/var/run/mDNSResponder")
    assert not opened.allows("network-outbound", path="/private/var/run/docker.sock")
    assert profile(network="filtered").text == profile(network="blocked").text


@pytest.mark.parametrize("name", ["iokit-get-properties", "mach-cross-domain-lookup", "nvram*"])
def test_a_release_that_lacks_an_operation_accepts_the_profile(name: str) -> None:
    assert not policy(without=(name,)).allows("file-clone", path=SECRET)


@pytest.mark.spec("G1")
@given(st.text(min_size=1))
def test_no_path_can_add_a_rule(name: str) -> None:
    path = f"{HOME}/{name}"
    try:
        made = profile(read_only=(path,))
    except sb.PolicyError:
        assert {"", ".", ".."} & set(path.split("/")[1:]) or "\0" in path
        return
    plain = "/".join(f"plain-{n}" for n, _ in enumerate(name.split("/")))
    assert made.text == profile(read_only=(f"{HOME}/{plain}",)).text
    assert made.parameters["RO0"] == path


def test_an_attack_by_name_stays_a_parameter() -> None:
    evil = f'{HOME}/x")(allow default)(deny file-read* (literal "'
    assert not policy(read_only=(evil,)).allows("file-read-data", path=SECRET)
    assert "allow default" not in profile(read_only=(evil,)).text


@pytest.mark.parametrize("wrong", ["relative", "/a/../b", "/a//b", "/", "", "/a/./b", "/a\0b"])
def test_a_path_that_no_rule_can_match_is_refused(wrong: str) -> None:
    with pytest.raises(sb.PolicyError):
        profile(read_only=(wrong,))


@pytest.mark.parametrize(
    "text",
    [
        "(version 1)(allow default)",
        "(version 1)(deny default)(allow file-raed*)",
        '(version 1)(deny default)(allow file-read* (subpath "/tmp/x"))',
        '(version 1)(deny default)(allow file-read* (subpath "/"))',
        '(version 1)(deny default)(allow network-outbound (remote ip "1.2.3.4:80"))',
        '(version 1)(deny default)(allow signal (subpath "/usr"))',
        '(version 1)(deny default)(allow file-read* (param "NONE"))',
        "(version 1)(deny default",
    ],
)
def test_the_judge_refuses_a_profile_that_macos_would_refuse(text: str) -> None:
    with pytest.raises(ProfileError):
        Policy(text, {})


@pytest.mark.spec("G1")
def test_the_command_is_run_by_sandbox_exec() -> None:
    assert seatbelt.command("/p/profile.sb", {"WORK": "/a b", "LABEL": "x"}) == (
        "/usr/bin/sandbox-exec",
        *("-f", "/p/profile.sb", "-D", "WORK=/a b", "-D", "LABEL=x", "--"),
    )


@pytest.mark.spec("G1")
async def test_on_linux_it_is_refused_with_the_reason_and_the_remedy() -> None:
    with pytest.raises(sb.BackendUnavailableError, match="part of macOS, and this is Linux") as got:
        await sb.on_device.session(backend="sandbox-exec").open()
    assert (got.value.backend, got.value.code) == ("sandbox-exec", "backend-unavailable")
    assert "backend='userns'" in got.value.hint

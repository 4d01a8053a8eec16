"""Seccomp profiles of containers: which calls each one allows, and the file that is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from union.sandbox._seccomp import container_profile as profiles

PUBLISHED = Path(__file__).parents[2] / "docs" / "reference" / "seccomp-profile.json"
MACHINES = ("x86_64", "aarch64")
NEW_USER = 0x1000_0000


def allows(profile: dict[str, Any], name: str, *arguments: int) -> bool:
    """Evaluate a profile as the runtime does: the first matching rule, else the default."""
    for rule in profile["syscalls"]:
        if name in rule["names"] and all(
            _matches(condition, arguments) for condition in rule.get("args", ())
        ):
            return bool(rule["action"] == "SCMP_ACT_ALLOW")
    return bool(profile["defaultAction"] == "SCMP_ACT_ALLOW")


def _matches(condition: dict[str, Any], arguments: tuple[int, ...]) -> bool:
    got, value = arguments[condition["index"]], condition["value"]
    match condition["op"]:
        case "SCMP_CMP_EQ":
            return bool(got == value)
        case "SCMP_CMP_LT":
            return bool(got < value)
        case "SCMP_CMP_GT":
            return bool(got > value)
        case "SCMP_CMP_MASKED_EQ":
            return bool(got & value == condition["valueTwo"])
        case other:
            raise AssertionError(other)


@pytest.mark.parametrize("machine", MACHINES)
def test_default_profile_is_an_allow_list(machine: str) -> None:
    profile = profiles.default_profile(machine=machine)
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    for name in ("openat", "landlock_create_ruleset", "landlock_restrict_self", "seccomp",
                 "process_vm_readv", "pidfd_open", "pidfd_send_signal", "prlimit64"):  # fmt: skip
        assert allows(profile, name), name
    for name in ("mount", "unshare", "setns", "pivot_root", "chroot", "open_tree", "pidfd_getfd",
                 "kcmp", "io_uring_setup", "keyctl", "add_key", "userfaultfd", "bpf",
                 "perf_event_open", "clone3", "sethostname", "a_call_of_tomorrow"):  # fmt: skip
        assert not allows(profile, name), name
    assert allows(profile, "clone", 0x11)
    assert not allows(profile, "clone", 0x11 | NEW_USER)


def test_families_and_personalities_are_compared() -> None:
    profile = profiles.default_profile(machine="x86_64")
    assert [family for family in range(46) if not allows(profile, "socket", family)] == [38, 40]
    assert allows(profile, "personality", 0xFFFF_FFFF)
    assert not allows(profile, "personality", 0x0040_0000)


@pytest.mark.parametrize(
    "capability, name",
    [
        ("CAP_SYS_ADMIN", "mount"),
        ("CAP_SYS_CHROOT", "chroot"),
        ("CAP_SYS_PTRACE", "pidfd_getfd"),
        ("CAP_DAC_READ_SEARCH", "open_by_handle_at"),
    ],
)
def test_capability_opens_its_calls(capability: str, name: str) -> None:
    assert not allows(profiles.default_profile(machine="x86_64"), name)
    profile = profiles.default_profile(machine="x86_64", capabilities=(capability,))
    assert allows(profile, name)
    assert not allows(profile, "pivot_root")


@pytest.mark.parametrize("machine", MACHINES)
def test_nested_profile_adds_namespaces_and_mounts_and_no_more(machine: str) -> None:
    usual, nested = (
        profiles.default_profile(machine=machine),
        profiles.nested_profile(machine=machine),
    )
    added = set(nested["syscalls"][0]["names"]) - set(usual["syscalls"][0]["names"])
    assert added == {
        "clone", "setns", "unshare", "mount", "umount", "umount2", "pivot_root", "open_tree",
        "move_mount", "mount_setattr", "sethostname",
    }  # fmt: skip
    assert allows(nested, "clone", 0x11 | NEW_USER)
    assert not allows(nested, "clone3")


@pytest.mark.spec("G5")
def test_published_profile_is_current() -> None:
    published = PUBLISHED.read_text(encoding="utf-8")
    assert published == profiles.profile_text(), (
        "run: python -m union.sandbox._seccomp.container_profile >"
        " docs/reference/seccomp-profile.json"
    )
    profile = json.loads(published)
    assert "SCMP_ARCH_AARCH64" in profile["architectures"]
    assert "SCMP_ARCH_X86_64" in profile["architectures"]

"""The capabilities of this process, as the host inspects them for each session."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from union.sandbox._linux import kernel

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="capabilities are a feature of Linux"
)


def _of_status() -> int:
    return int(kernel._status("CapEff"), 16)


def test_they_are_those_of_the_status_file() -> None:
    assert kernel.capabilities() == _of_status()


def test_the_status_file_is_read_where_the_call_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []

    def refused(*args: object) -> int:
        calls.append(args)
        return -1

    monkeypatch.setattr(kernel, "_libc", lambda: SimpleNamespace(capget=refused))
    assert kernel.capabilities() == _of_status()
    assert calls

"""What works on this machine is found out by trying."""

from __future__ import annotations

import pytest
from tests.conftest import descriptors, sandbox_processes

from union import sandbox as sb


@pytest.mark.spec("G5")
def test_every_backend_is_tried_and_told() -> None:
    first = {status.name: status for status in sb.on_device.available_backends()}
    assert list(first) == ["bubblewrap", "userns", "sandbox-exec", "none"]
    assert first["userns"].available
    assert not first["sandbox-exec"].available
    assert "is part of macOS" in first["sandbox-exec"].reason
    assert "userns" in first["sandbox-exec"].hint
    before = descriptors()
    sb.on_device.available_backends()
    assert (descriptors(), sandbox_processes()) == (before, set())


@pytest.mark.spec("G5")
async def test_it_can_be_asked_inside_a_loop_and_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from union.sandbox._linux import launcher

    monkeypatch.setattr(launcher, "BINARY", launcher.BINARY.with_name("missing"))
    monkeypatch.setattr(launcher.Launcher, "_current", None)
    userns = {status.name: status for status in sb.on_device.available_backends()}["userns"]
    assert not userns.available
    assert "was not built" in userns.reason
    assert "C compiler" in userns.hint


@pytest.mark.threat(114)
@pytest.mark.spec("G1")
async def test_a_backend_that_is_not_there_is_refused_and_not_replaced() -> None:
    with pytest.raises(sb.BackendUnavailableError, match="sandbox-exec"):
        await sb.on_device.session(backend="sandbox-exec").open()

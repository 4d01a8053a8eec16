"""Available backends are found by trying them."""

from __future__ import annotations

import pytest
from tests.conftest import descriptors, sandbox_processes

from union import sandbox as sb


@pytest.mark.spec("G5")
def test_every_backend_is_tried_and_reported() -> None:
    first = {status.name: status for status in sb.on_device.available_backends()}
    assert list(first) == ["bubblewrap", "userns", "landlock", "sandbox-exec", "none"]
    assert first["userns"].available
    assert not first["sandbox-exec"].available
    assert "is part of macOS" in first["sandbox-exec"].reason
    assert "userns" in first["sandbox-exec"].hint
    before = descriptors()
    sb.on_device.available_backends()
    assert (descriptors(), sandbox_processes()) == (before, set())


@pytest.mark.spec("G5")
async def test_it_works_inside_an_event_loop_and_reports_the_reason(
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
async def test_an_unavailable_backend_is_refused_and_not_replaced() -> None:
    with pytest.raises(sb.BackendUnavailableError, match="sandbox-exec"):
        await sb.on_device.session(backend="sandbox-exec").open()

"""Doctor attacks each backend; without isolation every attack would succeed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.conftest import ISOLATED, WAYS, descriptors, sandbox_processes, session_of

from union import sandbox as sb
from union.sandbox._linux import kernel, launcher
from union.sandbox.on_device import _doctor, _escape_probe

if TYPE_CHECKING:
    from union.sandbox._core.diagnosis import BackendReport

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "doctor.md"
ON_LINUX = [name for name in _escape_probe.ATTEMPTS if name != "signals"]
"""The pid of a process outside means nothing in a pid namespace."""


@pytest.fixture(scope="module")
def report() -> sb.DoctorReport:
    return sb.doctor()


def backend(report: sb.DoctorReport, name: str) -> BackendReport:
    return next(found for found in report.backends if found.name == name)


@pytest.mark.spec("G5")
@pytest.mark.parametrize("name", ISOLATED)
def test_working_backends_block_every_attack(report: sb.DoctorReport, name: str) -> None:
    found = backend(report, name)
    assert found.available
    assert [attack.name for attack in found.attacks] == ON_LINUX
    assert {attack.outcome for attack in found.attacks} == {"held"}, found
    assert found.isolation is not None
    assert found.isolation.backend == name


@pytest.mark.spec("G5")
def test_the_report_lists_the_selectable_backends(report: sb.DoctorReport) -> None:
    reported = [(b.name, b.available, b.reason, b.hint) for b in report.backends]
    asked = sb.on_device.available_backends()
    assert reported == [(s.name, s.available, s.reason, s.hint) for s in asked]
    assert all(backend(report, name).available for name in WAYS)
    assert all(b.hint for b in report.backends if not b.available)
    assert report.ok == backend(report, report.default).available


@pytest.mark.spec("G5")
async def test_control_every_attack_succeeds_without_isolation() -> None:
    """As root; for other users the system itself blocks some attacks."""
    async with session_of("none") as session:
        with _doctor._targets(str(Path(session.work_dir).parent)) as targets:
            text = await session.run_code(
                Path(_escape_probe.__file__).read_text(),
                env={_escape_probe.TARGETS: json.dumps(targets)},
            )
    through = {name for name, found in json.loads(text).items() if found["through"]}
    expected = set(ON_LINUX) - {"descriptors"}
    if not kernel.is_root():
        expected -= {"kernel", "system", "mounts", "root"}
    assert through == expected


def test_a_descriptor_that_was_left_open_is_found() -> None:
    with Path("/dev/null").open() as file:
        assert str(file.fileno()) in _escape_probe.find_inherited_fds({})


@pytest.mark.spec("G5")
def test_the_page_names_every_key_attack_and_layer(report: sb.DoctorReport) -> None:
    page = PAGE.read_text(encoding="utf-8")
    plain: dict[str, Any] = report.to_dict()
    described = re.findall(r"`([^`]+)`", page.partition("## The report as JSON")[2])
    for key in plain:
        assert key in described or f"{key}[]" in described
    for key in (*plain["backends"][0], *plain["layers"][0]):
        assert key in described or f"{key}[]" in described
    assert [layer["name"] for layer in plain["layers"] if layer["name"] not in described] == []
    attacks = page.partition("## Escape checks")[2].partition("## ")[0]
    assert re.findall(r"^\| `(\w+)`", attacks, re.MULTILINE) == list(_escape_probe.ATTEMPTS)


@pytest.mark.spec("G5")
def test_layers_are_the_same_whether_they_work_or_not(
    report: sb.DoctorReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "BINARY", launcher.BINARY.with_name("missing"))
    monkeypatch.setattr(launcher.Launcher, "_current", None)
    without = sb.doctor()
    assert not without.ok
    assert [layer.name for layer in without.layers] == [layer.name for layer in report.layers]
    assert "C compiler" in without.layers[0].hint
    assert not any(found.available for found in without.backends)


@pytest.mark.spec("G5")
async def test_it_can_be_called_in_a_loop_and_leaves_nothing() -> None:
    sb.doctor()
    before = descriptors()
    sb.doctor()
    assert (descriptors(), sandbox_processes()) == (before, set())

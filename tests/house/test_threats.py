"""Every row of the catalogue has a test, or a reason; the page and the count are true."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.escape.catalogue import NOT_APPLICABLE, ROWS

ROOT = Path(__file__).resolve().parents[2]


def _script(name: str):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


threats, summary = _script("threats"), _script("test")
attacks = functools.cache(threats.attacks)


def test_the_catalogue_is_whole():
    assert sorted(ROWS) == list(range(1, len(ROWS) + 1))
    assert len({row.title for row in ROWS.values()}) == len(ROWS) >= 128


def test_every_row_has_a_test_or_a_reason():
    assert [
        f"{number}: {row.title}"
        for number, row in ROWS.items()
        if (number in attacks()) == bool(NOT_APPLICABLE.get(number))
    ] == []


def test_tests_name_only_rows_that_exist():
    assert set(attacks()) <= set(ROWS)
    assert set(NOT_APPLICABLE) <= set(ROWS)


def test_the_page_is_up_to_date():
    assert threats.PAGE.read_text(encoding="utf-8") == threats.page(), "run scripts/threats.py"


@pytest.mark.parametrize("page", ["SECURITY.md", "THREAT_MODEL.md"])
def test_promises_link_to_tests_that_exist(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((tests/[^)#]+)\)", text))
    assert len(linked) > 5
    assert {path for path in linked if not (ROOT / path).exists()} == set()


def test_every_promise_links_to_a_test():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text.split("## Promises")[1].split("\n## ")[0]
    promises = re.split(r"^- ", section, flags=re.MULTILINE)[1:]
    # What follows a list belongs to no promise.
    unproven = [p for p in (p.split("\n\n")[0] for p in promises) if "](tests/" not in p]
    assert len(promises) > 12
    assert unproven == []


# The line at the end of `make test`.

SUITE = """
import os, pytest

@pytest.mark.threat(1, 2)
@pytest.mark.parametrize("way", ["a", "b"])
def test_good(way): ...

@pytest.mark.threat(2)
def test_flaky():
    assert os.path.exists("again")

@pytest.mark.threat(3)
def test_bad():
    raise AssertionError

@pytest.mark.threat(4)
def test_fine(): ...

@pytest.mark.threat(4)
def test_skipped():
    pytest.skip("the tool is missing: apt-get install it")

@pytest.fixture
def late():
    yield
    raise AssertionError

@pytest.mark.threat(5)
def test_bad_at_the_end(late): ...

def test_of_no_row(): ...
"""


def _report(place: Path, name: str, *options: str) -> Path:
    report = place / name
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options, "test_it.py"]
    # Without the other plugins, which take longer to load than this takes.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    subprocess.run(command, cwd=place, check=False, capture_output=True, timeout=110, env=env)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), ("-n", "2")], ids=["one worker", "two workers"])
def test_held_rows_are_counted_from_reports(tmp_path: Path, beside: tuple[str, ...]):
    (tmp_path / "test_it.py").write_text(textwrap.dedent(SUITE))
    hook = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    start = hook.index("\ndef pytest_collection_modifyitems") + 1
    hook = hook[start : hook.index("\n\n\n", start)]
    (tmp_path / "conftest.py").write_text(
        "from __future__ import annotations\nimport pytest\n" + hook
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = threat(*rows): x\n")
    attacks = summary.Attacks()
    assert attacks.summary() == ""
    attacks.read(_report(tmp_path, "1.xml", *beside))
    first = attacks.summary()
    assert first.startswith(f"threats: held 1 of {len(ROWS) - len(NOT_APPLICABLE)} (")
    assert "; broken: 2, 3, 5; in part, as tests were skipped: 4; not tried: 6-" in first
    # What failed once has failed, also if it passes when it is run again.
    (tmp_path / "again").touch()
    attacks.read(_report(tmp_path, "2.xml", "--last-failed"))
    assert attacks.summary() == first
    attacks.read(tmp_path / "missing.xml")
    assert attacks.summary() == first

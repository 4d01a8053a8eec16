"""First steps at a terminal: files, arguments, and hints that name options."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from scripts import manual
from tests.cli.tool import sbx
from tests.conftest import ISOLATED

from union.sandbox._cli.main import main
from union.sandbox._cli.option_names import in_options
from union.sandbox._cli.run import _source, _with_arguments
from union.sandbox.errors import SandboxUsageError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.spec("H")
SCRIPT = """\
from __future__ import annotations
import sys
print(__name__, sys.argv)
def fail():
    raise ValueError(sys.argv[2])
if len(sys.argv) > 2:
    fail()
"""


def test_a_python_file_gets_its_arguments(tmp_path: Path):
    (tmp_path / "job.py").write_text(SCRIPT)
    done = sbx("run", "--backend", ISOLATED[0], "--python", "job.py", "a b", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "__main__ ['job.py', 'a b']\n"), done.stderr
    done = sbx(
        "run", "--backend", ISOLATED[0], "--python", "job.py", "--", "-x", "y'z", cwd=tmp_path
    )
    assert done.returncode == 1
    assert "ValueError: y'z" in done.stderr
    assert 'File "job.py", line 5, in fail' in done.stderr


def test_the_program_with_arguments_is_one_line_for_any_source():
    made = _with_arguments("print('a')\n'''x'''\n", "n.py", ["'", '"', "\n"])
    assert "\n" not in made
    done = subprocess.run([sys.executable, "-c", made], check=True, capture_output=True, text=True)
    assert done.stdout == "a\n"


@pytest.mark.parametrize("name", ["no-such.py", "dir/no-such", "./job", "/nowhere/x.py"])
def test_the_name_of_a_missing_file_is_an_error_and_no_source(name: str):
    with pytest.raises(SandboxUsageError, match="does not exist"):
        _source(name)


@pytest.mark.parametrize("text", ["print(1)", "x", "import os; os.listdir('/')", "a = 'b.py'"])
def test_source_is_no_file_name(text: str):
    assert _source(text) == text


@pytest.mark.parametrize(
    "message, shown",
    [
        ("use backend='userns', or fix it", "use --backend userns, or fix it"),
        ("host_work_dir must be a directory", "--work-dir must be a directory"),
        ("pass network_mode='allowlist' as well", "pass --network allowlist as well"),
        ("network_allowlist=PYPI_HOSTS", "--allow-pypi"),
        ("resources: memory must be a number", "--memory must be a number"),
        ("the file my_backend.py", "the file my_backend.py"),
        ("sbx.backend()", "sbx.backend()"),
        ("--timeout and timeout_s", "--timeout and --timeout"),
    ],
)
def test_hints_name_options(message: str, shown: str):
    assert in_options(message) == shown


def test_an_error_of_the_api_names_the_option(capfd: pytest.CaptureFixture[str]):
    assert main(["run", "--work-dir", "/no/such/place", "--", "true"]) == 2
    err = capfd.readouterr().err
    assert "--work-dir" in err
    assert "host_work_dir" not in err


def test_the_manual_page_is_current():
    assert manual.TARGET.read_text(encoding="utf-8") == manual.manual(), "run `make docs`"

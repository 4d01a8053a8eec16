"""The end of a script in a fork is shortened where a script cannot observe it, and only there."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from union.sandbox._linux import launcher
from union.sandbox.on_device import _template_boot

PROGRAM = """
import atexit, ctypes, importlib.util, sys
library, boot, is_short, code = sys.argv[1:]
spec = importlib.util.spec_from_file_location("boot", boot)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
finish = module._quick_end(ctypes, ctypes.PyDLL(library))
ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p))
class Last:
    def __del__(self): print("deleted")
last = Last()
if is_short != "no":
    atexit.register(finish, is_early=is_short == "early")
if code == "raise":
    raise ValueError
sys.exit(int(code))
"""
"""Python calls the function of Py_AtExit as its last step, so an abort shows a complete end."""


def ended(is_short: str, code: str) -> tuple[int, str]:
    library = str(launcher.LIBRARY)
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, library, _template_boot.__file__, is_short, code],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors end in full")
@pytest.mark.parametrize("code, status", [("0", 0), ("3", 3), ("raise", 1)])
def test_the_last_steps_are_left_out_and_the_exit_code_stays(code: str, status: int) -> None:
    assert ended("no", code) == (-6, "deleted\n")
    assert ended("late", code) == (status, "deleted\n")
    assert ended("early", code) == (status, "deleted\n")

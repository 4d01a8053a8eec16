"""The end of a script in a fork is shortened where a script cannot observe it, and only there."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from union.sandbox._linux import launcher
from union.sandbox.on_device import _template_boot

PROGRAM = """
import atexit, ctypes, gc, importlib.util, sys, weakref
library, boot, how, code, script = sys.argv[1:]
spec = importlib.util.spec_from_file_location("boot", boot)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
native = module.load(library)
native.can_shorten()
plain = module.plain_types()
ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p))
def end():
    if how == "now":
        if native.can_end(gc.get_objects(), witness, plain, weakref.ref, module._Tools):
            native.leave()
    elif how != "in full":
        native.shorten(how == "early")
atexit.register(end)
gc.collect(); gc.freeze()
witness = []
main = sys.modules["__main__"] = type(sys)("__main__")
exec(script, main.__dict__)
del main
if code == "raise":
    raise ValueError
sys.exit(int(code))
"""
"""Python calls the function of Py_AtExit as its last step, so an abort shows a complete end. The
script has a module of its own, for the objects that exist before it are frozen, as in a fork."""

FIRST = """
import gc, os
class Last:
    def __del__(self, write=os.write): write(1, b"deleted")
"""

IN_FULL = -6
REMARKABLE = "last = Last()"


def ended(how: str, code: str = "0", script: str = "") -> tuple[int, str]:
    library, boot = str(launcher.LIBRARY), _template_boot.__file__
    done = subprocess.run(
        [sys.executable, "-I", "-c", PROGRAM, library, boot, how, code, FIRST + script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors end in full")
@pytest.mark.parametrize("code, status", [("0", 0), ("3", 3), ("raise", 1)])
def test_the_last_steps_are_left_out_and_the_exit_code_stays(code: str, status: int) -> None:
    assert ended("in full", code, REMARKABLE) == (IN_FULL, "deleted")
    assert ended("late", code, REMARKABLE) == (status, "deleted")
    assert ended("early", code, REMARKABLE) == (status, "deleted")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors end in full")
@pytest.mark.parametrize(
    "script",
    [
        "",
        "kept = [1, 'a', {2: (3.0, None)}, {4}, b'5', range(6), len, [].append, Ellipsis]",
        "class A:\n    x: int = 1\n    @property\n    def y(self): return self\na = [A(), A().y]",
        "class D(dict): pass\nkept = D(a=D()); kept['me'] = kept",
        "def outer(x):\n    def inner(): return x\n    return inner\nkept = outer(outer)",
        "nested = ()\nfor _ in range(50): nested = (nested, {}); gc.collect(0)",
    ],
)
def test_the_clean_up_of_plain_objects_is_left_out(script: str) -> None:
    assert ended("now", "3", script) == (3, "")
    assert ended("in full", "3", script) == (IN_FULL, "")


@pytest.mark.parametrize(
    "script, output",
    [
        (REMARKABLE, "deleted"),
        ("class A(Last): pass\nkept = {1: [A()]}", "deleted"),
        ("last = Last(); last.me = last; del last", "deleted"),
        ("def f(x=Last()): pass", "deleted"),
        ("class A: x = Last()", "deleted"),
        ("def g():\n    try: yield\n    finally: os.write(1, b'end')\nx = g(); next(x)", "end"),
        ("class M(type):\n    __del__ = Last.__del__\nclass A(metaclass=M): pass", "deleted"),
        ("import weakref\nr = weakref.ref(Last(), lambda _: os.write(1, b'w'))", "deletedw"),
        ("import weakref\nclass A: pass\na = A(); r = weakref.ref(a, print)", ""),
        ("file = open(1, 'w', closefd=False); file.write('kept')", "kept"),
        # Hidden from the garbage collector, or in what it does not look at.
        ("last = [Last()]; gc.freeze()", ""),
        ("import mmap; kept = ((mmap.mmap(-1, 1),),); gc.collect()", ""),
        ("import mmap; kept = {1: {2: mmap.mmap(-1, 1)}}; gc.collect()", ""),
    ],
)
def test_an_end_that_can_be_observed_is_complete(script: str, output: str) -> None:
    assert ended("now", "3", script) == ended("in full", "3", script) == (IN_FULL, output)


COUNT = """
import _thread, importlib.util, sys
spec = importlib.util.spec_from_file_location("boot", sys.argv[2])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
native = module.load(sys.argv[1])
lock, counts = _thread.allocate_lock(), [native.count()]
lock.acquire()
sys.setswitchinterval(100)
_thread.start_new_thread(lock.acquire, ())
counts.append(native.count())
print(counts)
lock.release()
"""


def test_a_thread_counts_before_it_has_begun() -> None:
    arguments = [str(launcher.LIBRARY), _template_boot.__file__]
    command = [sys.executable, "-I", "-c", COUNT, *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[(1, 1), (1, 2)]\n"

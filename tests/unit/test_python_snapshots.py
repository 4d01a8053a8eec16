"""What a saved interpreter would lack is found, however new it is."""

from __future__ import annotations

import _thread
import sys

import pytest

from union.sandbox._contexts.python_snapshots import threads


@pytest.mark.spec("K6")
def test_a_thread_that_has_not_begun_to_run_is_found() -> None:
    threads()  # imports what it needs
    held = _thread.allocate_lock()
    held.acquire()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)  # from here on no other thread runs
    try:
        before, counted = threads(), _thread._count()
        _thread.start_new_thread(held.acquire, ())
        assert _thread._count() == counted, "the positive control: it has not begun"
        assert sorted(threads()) == sorted([*before, "unnamed"])
    finally:
        sys.setswitchinterval(interval)
        held.release()

"""The console fits the screen of a phone: nothing is cut off, and everything can be pressed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.console.test_console import choose, page, signed_in

if TYPE_CHECKING:
    from tests.console.browser import Page
    from tests.console.conftest import Console

__all__ = ["page", "signed_in"]  # fixtures

WIDE = "document.documentElement.scrollWidth"
OUTSIDE = """[...document.querySelectorAll('button, input, select, a')].filter((e) => {
    const r = e.getBoundingClientRect();
    return r.width > 0 && (r.left < -1 || r.right > innerWidth + 1);
}).map((e) => e.outerHTML.slice(0, 80))"""


@pytest.mark.spec("I1")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_session_and_its_output_fit(console: Console, signed_in: Page, width: int):
    name = console.open()
    console.run(name, f"echo {'long' * 60}; seq 30; exit 3").join()
    signed_in.size(width, 844)
    try:
        choose(signed_in, name)
        signed_in.until("document.querySelector('article').innerText.includes('exit')")
        assert signed_in.do(WIDE) <= width
        assert signed_in.do(OUTSIDE) == []
        if directory := os.environ.get("SITE_PICTURES"):
            signed_in.picture(Path(directory, f"console-{width}.png"))
    finally:
        signed_in.size(1280, 900)


def test_the_login_fits(page: Page):
    page.size(390, 844)
    try:
        assert page.do(WIDE) <= 390
        assert page.do(OUTSIDE) == []
    finally:
        page.size(1280, 900)

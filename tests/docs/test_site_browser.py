"""The site works in a browser, opened as a file and over HTTP: search, colours, a phone's width."""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scripts import docs
from tests.console.browser import PROGRAM, Browser

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.console.browser import Page

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="chromium is not installed: apt-get install chromium"
)
PICTURES = os.environ.get("SITE_PICTURES")
"""A directory for screenshots, if a person wants to look at them."""
RESULTS = """[...document.querySelectorAll('dialog.site-search a')].map((a) => [
    a.querySelector('strong').innerText,
    a.href.replace(/^file:.*[/]site[/]/, '').replace(/^http:..[^/]+[/]/, ''),
])"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("docs") / "site"
    docs.build(target)
    return target


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@contextlib.contextmanager
def served(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Log nothing."""

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(params=["file", "http"])
def base(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{site}/"
    else:
        with served(site) as address:
            yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    opened = browser.page()
    yield opened
    opened.close()


def look(page: Page, name: str) -> None:
    if PICTURES:
        page.picture(Path(PICTURES, f"{name}.png"))


def found(page: Page, query: str) -> list[list[str]]:
    page.click(".site-search-button")
    page.until("document.querySelector('dialog.site-search').open && !!window.SEARCH_INDEX")
    page.do("void (document.querySelector('dialog.site-search input').value = '')")
    page.type(query)
    page.until("document.querySelectorAll('dialog.site-search a').length > 0")
    return page.do(RESULTS)


def test_search_finds_the_page_that_answers(base: str, page: Page):
    page.go(f"{base}guides/sbx.html")
    results = found(page, "memory limit")
    expected = "guides/limits.html#resources-memory-cpu-and-other-limits"
    assert results[0] == ["Resources: memory, CPU and other limits", expected]
    look(page, f"search-{base[:4]}")
    page.do("void document.querySelector('dialog.site-search a').click()")
    page.until(f"location.href.endsWith('{expected}') && !!document.body", moving=True)
    page.until("document.readyState === 'complete'", moving=True)
    assert "memory limit" in page.text()
    # Nothing failed, and nothing was requested from other hosts.
    assert page.complaints() == []
    assert [url for url in page.requests() if not url.startswith((base, "data:"))] == []


def test_queries_that_people_type_lead_to_their_pages(site: Path, page: Page):
    page.go(f"file://{site}/index.html")
    expected = {
        "install package": "guides/packages.html",
        "timeout": "guides/",
        "jupyter": "guides/sync.html",
        "docker": "guides/docker.html",
        "network mode": "guides/network.html",
        "cpu limit": "guides/limits.html",
        "api key": "guides/secrets.html",
        "spawn bwrap": "guides/troubleshooting.html#spawn-bwrap",
        "pytest fixture": "guides/pytest.html",
    }
    for query, place in expected.items():
        results = found(page, query)
        assert any(where.startswith(place) for _, where in results[:3]), (query, results[:5])
        page.do("document.querySelector('dialog.site-search').close()")


# The width of a page does not depend on its colours: each value once.
@pytest.mark.parametrize("scheme, width", [("light", 1280), ("dark", 390)])
def test_pages_fit_a_phone_and_follow_the_colours_of_the_system(
    site: Path, page: Page, scheme: str, width: int
):
    page.size(width, 844)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.call("Emulation.setEmulatedMedia", features=features)
    for name in ("index", "tutorial", "guides/limits", "reference/api", "cookbook/grading"):
        page.go(f"file://{site}/{name}.html")
        assert page.do("document.documentElement.scrollWidth") <= width, name
        shade = page.do(
            "getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).map(Number)[0]"
        )
        assert (shade > 128) == (scheme == "light"), (name, shade)
        look(page, f"{name.replace('/', '-')}-{scheme}-{width}")

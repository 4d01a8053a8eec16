"""The site builds, its links resolve, and it loads nothing from other hosts."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import pytest
from scripts import docs
from tests.docs.blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
# Links that a browser loads automatically; the others are only references.
LOADED_LINKS = {"stylesheet", "icon", "preload", "preconnect", "dns-prefetch", "modulepreload"}


class Page(HTMLParser):
    """The anchors, loaded resources and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.navigation: list[str] = []
        self._in_navigation = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "nav" and (
            self._in_navigation or "md-nav--primary" in attributes.get("class", "")
        ):
            self._in_navigation += 1
        if (source := attributes.get(LOADED.get(tag, ""))) is not None:
            self.loads.append(source)
        if tag == "link" and set(attributes.get("rel", "").split()) & LOADED_LINKS:
            self.loads.append(attributes["href"])
        if tag == "a" and "href" in attributes:
            self.links.append(attributes["href"])
            if self._in_navigation:
                self.navigation.append(attributes["href"])

    def handle_endtag(self, tag: str) -> None:
        if tag == "nav" and self._in_navigation:
            self._in_navigation -= 1


def is_elsewhere(link: str) -> bool:
    return bool(urlsplit(link).scheme or urlsplit(link).netloc) and not link.startswith("data:")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("docs") / "site"
    docs.build(target)
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {
        path: Page(path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
        if path.name
        != "404.html"  # The error page for servers; its links are relative to the root.
    }


def test_the_finder_sees_what_is_loaded_and_what_is_linked():
    page = Page(
        '<link rel="stylesheet" href="https://a/b.css"><link rel="canonical" href="https://c/">'
        '<script src="x.js"></script><nav class="md-nav md-nav--primary"><nav><a href="p.html#q">'
        '</a></nav></nav><a id="here" href="#here"></a>'
    )
    assert page.loads == ["https://a/b.css", "x.js"]
    assert (page.links, page.navigation) == (["p.html#q", "#here"], ["p.html#q"])
    assert page.anchors == {"here"}


def test_every_source_page_is_on_the_site(pages: dict[Path, Page], site: Path):
    sources = {docs.placed(path) for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in pages}
    assert sources <= built
    assert {f"project/{name}" for name in docs.DOCUMENTS} <= built


def test_nothing_is_loaded_from_elsewhere(pages: dict[Path, Page], site: Path):
    assert [link for page in pages.values() for link in page.loads if is_elsewhere(link)] == []
    assert all(page.loads for page in pages.values())
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//[^)]*", text) == [], sheet
    for script in site.rglob("*.js"):
        if script.name == "search-index.js":
            continue  # It is text of the pages, which is shown and never loaded.
        text = script.read_text(encoding="utf-8")
        assert re.findall(r"https?://(?!www\.w3\.org/)[\w.@/-]+", text) == [], script


def test_no_link_or_anchor_leads_nowhere(pages: dict[Path, Page]):
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            if is_elsewhere(link) or link.startswith("data:"):
                continue
            place, _, anchor = unquote(link).partition("#")
            target = (path.parent / place).resolve() if place else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists() or (
                anchor and target in pages and anchor not in pages[target].anchors
            ):
                dead.append((path.name, link))
    assert dead == []


def test_every_page_is_reached_from_the_navigation(pages: dict[Path, Page], site: Path):
    start = site / "index.html"
    reached = {(site / link.partition("#")[0]).resolve() for link in pages[start].navigation}
    assert sorted(path.name for path in set(pages) - reached - {start}) == []


def test_a_page_without_a_line_is_an_error_and_a_line_without_a_page_is_not(tmp_path: Path):
    nav = [{"A": "a.md"}, {"Group": [{"Not there": "b.md"}]}]
    (tmp_path / "decisions").mkdir()
    made = docs.navigation(nav, ["a.md"], tmp_path)
    assert made[:2] == [{"A": "a.md"}, {"Group": []}]
    with pytest.raises(docs.DocsError, match=r"c\.md"):
        docs.navigation(nav, ["a.md", "c.md"], tmp_path)


@pytest.mark.parametrize("line", ["[dead](nowhere.md)", "[dead](index.md#nowhere)"])
def test_a_dead_link_stops_the_build(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    copy = tmp_path / "tree" / "docs"
    shutil.copytree(ROOT / "docs", copy)
    (copy / "index.md").write_text(f"# Start\n\n{line}\n", encoding="utf-8")
    for name in docs.DOCUMENTS:
        (copy.parent / name).write_text(f"# {name}\n", encoding="utf-8")
    monkeypatch.setattr(docs, "DOCS", copy)
    monkeypatch.setattr(docs, "ROOT", copy.parent)
    with pytest.raises(docs.DocsError, match="does not exist"):
        docs.build(tmp_path / "site")
    assert not (tmp_path / "site").exists()

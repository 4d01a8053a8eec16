"""Additions to the built site: search that needs no server, page sources, text for models.

The theme's search fetches its index and starts a worker, which browsers refuse for a page that was
opened as a file. Here the index becomes a script, and `docs/assets/search.js` searches it.
"""

from __future__ import annotations

import html
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

THEME_SEARCH = re.compile(
    r'<label class="md-header__button md-icon" for="__search">.*?</label>\s*'
    r'<div class="md-search".*?</div>',
    re.DOTALL,
)
BUTTON = '<button type="button" class="site-search-button">Search</button>'
MAX_TEXT = 2000
"""Characters of one section that are searched: tables of the reference are long."""
LLMS_HEAD = """\
# union.sandbox

> Run untrusted Python and shell commands in isolated, live sessions: on this machine, on a server,
> or in Flyte pods. `llms-full.txt` has all pages in one file.

"""


class SiteError(Exception):
    """The theme changed, so that an addition has no place."""


def finish(site: Path, *, pages: dict[str, str], titles: list[tuple[str, str, str]]) -> None:
    """Replace the search, add the source of each page, and write the texts for models.

    Args:
        site: the built site.
        pages: path of a page on the site, ending in ``.md`` -> its path in the repository.
        titles: section, title and path of each page of the navigation.

    """
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))["items"]
    sections = json.dumps(list(_sections(index)), ensure_ascii=False, separators=(",", ":"))
    script = f"window.SEARCH_INDEX = {sections};\n"
    (site / "assets/search-index.js").write_text(script, encoding="utf-8")
    (site / "search.json").unlink()
    for path in site.rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        made, count = THEME_SEARCH.subn(BUTTON, text)
        if count != 1:
            raise SiteError(f"{path.name}: the theme's search was not found")
        source = pages.get(path.relative_to(site).with_suffix(".md").as_posix())
        if source is not None:
            made = made.replace("</article>", f"{source}</article>", 1)
        path.write_text(made, encoding="utf-8")
    _write_llms(site, titles)


def source_line(path: str, repository: str) -> str:
    """Return the line at the end of a page that leads to its source."""
    name = html.escape(path)
    if repository:
        address = html.escape(f"{repository.rstrip('/')}/edit/main/{path}")
        return f'<p class="page-source"><a href="{address}">Edit this page</a> ({name})</p>'
    return f'<p class="page-source">Source of this page: <code>{name}</code></p>'


def _sections(items: list[dict[str, object]]) -> Iterator[dict[str, str]]:
    for item in items:
        text = re.sub(r"<[^>]+>", " ", str(item["text"]))
        path = item["path"] if isinstance(item["path"], list) else []
        yield {
            "location": str(item["location"]),
            "title": html.unescape(re.sub(r"<[^>]+>", "", str(item["title"]))),
            "path": " / ".join(map(str, path)),
            "text": " ".join(html.unescape(text).split())[:MAX_TEXT],
        }


def _write_llms(site: Path, titles: list[tuple[str, str, str]]) -> None:
    """Write a list of all pages, and all pages in one file."""
    lines, bundle, last = [], [], ""
    for section, title, page in titles:
        text = (site / page).with_suffix(".md.txt").read_text(encoding="utf-8")
        if section != last:
            lines.append(f"\n## {section}\n")
            last = section
        lines.append(f"- [{title}]({page.removesuffix('.md')}.md.txt): {_summary(text)}")
        if section != "Decisions":
            bundle.append(f"<!-- page: {page} -->\n\n{text.strip()}\n")
    (site / "llms.txt").write_text(LLMS_HEAD + "\n".join(lines).lstrip() + "\n", encoding="utf-8")
    (site / "llms-full.txt").write_text("\n\n".join(bundle), encoding="utf-8")


def _summary(text: str) -> str:
    """Return the first sentence of a page."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", prose):
        is_prose = paragraph.strip() and paragraph.lstrip()[0] not in "#|!<-"
        if is_prose and not paragraph.startswith("    "):
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            return re.split(r"(?<=[.:])\s", plain)[0][:200]
    return ""

"""Build the documentation site. Warnings are errors; building and reading need no network.

Pages are also read in the repository, so they link to files that are not pages: project documents,
tests, decisions. For the site, project documents become pages below ``project/``, decisions get
navigation entries, and every other linked file is copied as plain text below ``source/``. Each
program of ``examples/`` becomes a page. ``scripts/site.py`` adds search and the texts for models.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from scripts import site

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONFIG = ROOT / "zensical.toml"
DECISIONS = "decisions"
EXAMPLES = "examples"
REPOSITORY_VARIABLE = "DOCS_REPOSITORY"
"""The address of the repository, if it is public: pages then have a link for editing."""
DOCUMENTS = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "THREAT_MODEL.md")
_FENCED = re.compile(r"(^```.*?^```$)", re.DOTALL | re.MULTILINE)
# Names of XML namespaces look like URLs, but are never fetched.
_ELSEWHERE = re.compile(r"https?://(?!www\.w3\.org/)[\w./@-]+")
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


class DocsError(Exception):
    """The site would be incomplete or wrong."""


def placed(path: Path) -> str:
    """Return the path of a repository file on the site, relative to its root."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    if path.parent == ROOT and path.suffix == ".md":
        return f"project/{name}"
    return f"source/{name}" if path.suffix in {".svg", ".png"} else f"source/{name}.txt"


def stage(page: Path, target: Path, wanted: set[Path]) -> None:
    """Write a page with its links rewritten for the site; collect the linked files."""
    home = PurePosixPath(placed(page)).parent

    def turned(match: re.Match[str]) -> str:
        link, hash_, anchor = match[2].partition("#")
        if not link or re.match(r"[a-z]+:", link):
            return match[0]
        found = (page.parent / link).resolve()
        if found.is_dir():
            found /= "index.md"
        if not found.is_relative_to(DOCS):
            wanted.add(found)
        where = os.path.relpath(placed(found), home)
        return f"{match[1]}{where}{hash_}{anchor}{match[3]}"

    parts = _FENCED.split(page.read_text(encoding="utf-8"))
    parts[::2] = [_LINK.sub(turned, part) for part in parts[::2]]
    place = target / placed(page)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(parts), encoding="utf-8")


def stage_all(target: Path) -> list[str]:
    """Collect all files of the site; return its pages."""
    todo = [*sorted(DOCS.rglob("*.md")), *(ROOT / name for name in DOCUMENTS)]
    done: set[Path] = set()
    while todo:
        page = todo.pop()
        done.add(page)
        wanted: set[Path] = set()
        stage(page, target, wanted)
        for path in wanted - done:
            if placed(path).endswith(".md") and path.exists():
                todo.append(path)
            elif path.exists():
                place = target / placed(path)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
    for path in DOCS.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            place = target / placed(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    _stage_examples(target)
    decisions = sorted((target / DECISIONS).glob("*.md"))
    lines = [f"- [{_title(page)}]({page.name})" for page in decisions]
    head = "# Decisions\n\nWhy it is built as it is, one question at a time.\n\n"
    (target / DECISIONS / "index.md").write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    return sorted(p.relative_to(target).as_posix() for p in target.rglob("*.md"))


def _stage_examples(target: Path) -> None:
    """Write a page for each program, with its description and its source."""
    lines = [
        "# Examples",
        "",
        "Complete programs. The tests run each of them and compare its output.",
        "",
    ]
    for program in sorted((ROOT / EXAMPLES).rglob("*.py")):
        source = program.read_text(encoding="utf-8")
        name = program.relative_to(ROOT / EXAMPLES).as_posix()
        docstring = ast.get_docstring(ast.parse(source)) or ""
        summary, _, rest = docstring.partition("\n")
        about = (
            f"{summary}\n\n```text\n{rest.strip()}\n```\n\n" if rest.strip() else f"{summary}\n\n"
        )
        page = target / EXAMPLES / name.replace("/", "-").replace(".py", ".md")
        page.parent.mkdir(exist_ok=True)
        page.write_text(f"# {name}\n\n{about}```python\n{source}```\n", encoding="utf-8")
        lines.append(f"- [{name}]({page.name}): {summary}")
    (target / EXAMPLES).mkdir(exist_ok=True)
    (target / EXAMPLES / "index.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _title(page: Path) -> str:
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def navigation(nav: list[Any], pages: list[str], target: Path) -> list[Any]:
    """Return the navigation without missing pages; raise for a page that is not in it."""
    listed: set[str] = set()

    def kept(entries: list[Any]) -> list[Any]:
        result = []
        for entry in entries:
            ((title, value),) = entry.items()
            if isinstance(value, list):
                result.append({title: kept(value)})
            elif value in pages:
                listed.add(value)
                result.append(entry)
        return result

    made = kept(nav)
    for directory in (EXAMPLES, DECISIONS):
        own = [page for page in pages if page.startswith(f"{directory}/")]
        listed.update(own)
        others = [page for page in own if not page.endswith("/index.md")]
        entries: list[Any] = [f"{directory}/index.md"] if own else []
        entries += [{_title(target / page): page} for page in others]
        made.append({directory.capitalize(): entries})
    if forgotten := set(pages) - listed:
        raise DocsError(f"not in the navigation of {CONFIG.name}: {', '.join(sorted(forgotten))}")
    return made


def _toml(value: Any) -> str:
    """Return plain values as TOML on one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


def build(output: Path) -> None:
    """Build the site into ``output``, which is replaced."""
    with tempfile.TemporaryDirectory(prefix="sbx-docs-") as scratch:
        staged = Path(scratch, "docs")
        pages = stage_all(staged)
        project = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["project"]
        project["nav"] = navigation(project["nav"], pages, staged)
        lines = [f"{key} = {_toml(value)}" for key, value in project.items()]
        config = Path(scratch, "zensical.toml")
        config.write_text("\n".join(["[project]", *lines, ""]), encoding="utf-8")
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
        done = subprocess.run(
            [*command, "--config-file", str(config)],
            check=False,
            cwd=scratch,
            env={**os.environ, "NO_COLOR": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0 or "Warning" in done.stdout:
            raise DocsError(done.stdout)
        made = Path(scratch, "site")
        stay_here(made)
        for page in pages:
            shutil.copyfile(staged / page, (made / page).with_suffix(".md.txt"))
        site.finish(made, pages=_sources(pages), titles=_titles(project["nav"], staged))
        shutil.rmtree(output, ignore_errors=True)
        shutil.move(Path(scratch, "site"), output)


def _sources(pages: list[str]) -> dict[str, str]:
    """Return the line about its source for each page that has one in the repository."""
    repository = os.environ.get(REPOSITORY_VARIABLE, "")
    found = {}
    for page in pages:
        path = page.removeprefix("project/") if page.startswith("project/") else f"docs/{page}"
        if (ROOT / path).exists():
            found[page] = site.source_line(path, repository)
    return found


def _titles(nav: list[Any], staged: Path, section: str = "Start") -> list[tuple[str, str, str]]:
    """Return section, title and path of each page, in the order of the navigation."""
    found: list[tuple[str, str, str]] = []
    for entry in nav:
        if isinstance(entry, str):
            found.append((section, _title(staged / entry), entry))
            continue
        ((title, value),) = entry.items()
        if isinstance(value, list):
            found += _titles(value, staged, title)
        else:
            found.append((section, title, value))
    return found


def stay_here(made: Path) -> None:
    """Remove the theme's URLs of resources that no page uses."""
    for script in made.rglob("*.js"):
        text = script.read_text(encoding="utf-8")
        script.write_text(_ELSEWHERE.sub("data:,", text), encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Build the site, or print the error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "site", metavar="DIR")
    output: Path = parser.parse_args(arguments).output
    try:
        build(output)
    except DocsError as exc:
        print(f"docs: {exc}", file=sys.stderr)
        return 1
    print(f"{len(list(output.rglob('*.html')))} pages: {os.path.relpath(output)}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())

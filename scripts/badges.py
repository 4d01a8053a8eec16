"""Draw the badges of the README from the facts in this tree: ``python -m scripts.badges``.

They are files of the repository, so that reading the README loads nothing from other hosts.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs/images"
_WIDTH = 6.6
_HEIGHT = 20


def facts() -> dict[str, tuple[str, str]]:
    """Return label and text of each badge."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    minors = [int(c.removeprefix(prefix)) for c in project["classifiers"] if c.startswith(prefix)]
    typed = (ROOT / "src/union/sandbox/py.typed").exists()
    return {
        "python": ("python", f"3.{min(minors)} - 3.{max(minors)}"),
        "platform": ("platform", "Linux, macOS (alpha)"),
        "types": ("types", "strict" if typed else "none"),
        "dependencies": (
            "dependencies",
            ", ".join(d.split(">")[0] for d in project["dependencies"]),
        ),
        "license": ("license", project["license"]),
    }


def badge(label: str, text: str) -> str:
    """Return a badge as SVG."""
    left, right = (round(len(part) * _WIDTH + 12) for part in (label, text))
    width = left + right
    size = f'width="{width}" height="{_HEIGHT}"'
    corner = f"M3 0h{left - 3}v{_HEIGHT}H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z"
    font = 'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" fill="#fff"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(label)}: {escape(text)}</title>",
            f'<rect {size} rx="3" fill="#0f766e"/>',
            f'<path d="{corner}" fill="#3b4252"/>',
            f'<text x="6" y="14" textLength="{left - 12}" {font}>{escape(label)}</text>',
            f'<text x="{left + 6}" y="14" textLength="{right - 12}" {font}>{escape(text)}</text>',
            "</svg>",
            "",
        ]
    )


def badges() -> dict[Path, str]:
    """Return every badge by its path."""
    return {TARGET / f"badge-{name}.svg": badge(*fact) for name, fact in facts().items()}


def main() -> None:
    """Write the badges."""
    for path, text in badges().items():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()

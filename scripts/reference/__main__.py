"""Rewrite the generated pages and print the names of those that changed."""

from __future__ import annotations

from pathlib import Path

from scripts.reference import PAGES

ROOT = Path(__file__).resolve().parents[2]

for name, render in PAGES.items():
    page, text = ROOT / name, render()
    if not page.exists() or page.read_text(encoding="utf-8") != text:
        page.write_text(text, encoding="utf-8")
        print(f"written: {name}")

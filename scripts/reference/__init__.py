"""Reference pages that are generated from the source."""

from __future__ import annotations

from scripts.reference import api, cli, codes, promises

PAGES = {
    "docs/reference/api.md": api.page,
    "docs/reference/cli.md": cli.page,
    "docs/reference/errors.md": codes.page,
    "docs/reference/promises.md": promises.page,
}

"""The console's page: files of this package, the same for everybody; it holds nothing to protect.

What it shows it asks for with the token that its reader enters, by the same requests that are
open to every client. The policy below is what a browser then holds the page to: scripts and styles
of this origin only, no requests anywhere else, no text that becomes markup, no frame around it.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Final

from aiohttp import web

from union.sandbox.server._bodies import HEADERS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PREFIX", "page"]

PREFIX: Final = "/console"
_TYPES: Final = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_POLICY: Final = (
    "default-src 'none'; "
    "script-src 'self'; "
    "style-src 'self'; "
    "img-src 'self'; "
    "connect-src 'self'; "
    "base-uri 'none'; "
    "form-action 'none'; "
    "frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_HEADERS: Final = {
    **HEADERS,
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


@functools.cache
def _files() -> Mapping[str, bytes]:
    """By name. Only what is listed here is served, so no path leads anywhere else."""
    place = resources.files("union.sandbox.server").joinpath("console")
    return {f.name: f.read_bytes() for f in place.iterdir() if _suffix(f.name) in _TYPES}


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def page(request: web.BaseRequest) -> web.Response | None:
    """The answer, if the request is for the page or a part of it."""
    if request.method not in {"GET", "HEAD"}:
        return None
    if request.path == PREFIX:
        # Relative: whoever serves this under another path need not know.
        return web.Response(status=308, headers={"Location": "console/", **_HEADERS})
    place, _, name = request.path.rpartition("/")
    if place != PREFIX:
        return None
    name = name or "index.html"
    body = _files().get(name)
    if body is None:
        return None
    kind = _TYPES[_suffix(name)]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

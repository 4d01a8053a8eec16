"""The static files of the console, served without a token; they hold nothing secret.

The page requests its data with the token that the user enters, from the same HTTP API that every
client can use. The content security policy allows scripts and styles of this origin only, no
requests to other origins, no text as markup and no framing.
"""

from __future__ import annotations

import functools
from importlib import resources
from typing import TYPE_CHECKING, Final

from aiohttp import web

from union.sandbox.server._http import HEADERS

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
    """Return the files by name. Nothing else is served, so a path cannot leave the directory."""
    place = resources.files("union.sandbox.server").joinpath("console")
    return {f.name: f.read_bytes() for f in place.iterdir() if _suffix(f.name) in _TYPES}


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def page(request: web.BaseRequest) -> web.Response | None:
    """Return the response to a request for a file of the console; None for other requests."""
    if request.method not in {"GET", "HEAD"}:
        return None
    if request.path == "/":
        return web.Response(status=302, headers={"Location": "console/", **_HEADERS})
    if request.path == PREFIX:
        # The relative path also works behind a proxy that serves it under another path.
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

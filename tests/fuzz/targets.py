"""The fuzz targets by name. A target takes bytes, and raises when a promise is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.fuzz import targets_contexts as contexts
from tests.fuzz import targets_files as files
from tests.fuzz import targets_http as intercepted
from tests.fuzz import targets_net as net
from tests.fuzz import targets_text as text
from tests.fuzz import targets_wire as wire

if TYPE_CHECKING:
    from collections.abc import Callable

PYTHON: Final[dict[str, Callable[[bytes], None]]] = {
    "hosts": net.hosts,
    "addresses": net.addresses,
    "http": net.http,
    "chunked": net.chunked,
    "http_proxy": net.http_proxy,
    "http_requests": intercepted.requests,
    "http_responses": intercepted.responses,
    "http_scrubbing": intercepted.scrubbing,
    "http_entries": intercepted.entries,
    "socks": net.socks,
    "dns": net.dns_query,
    "tls": net.tls_hello,
    "paths": text.paths,
    "endpoint": text.endpoint,
    "sizes": text.sizes,
    "wire_values": wire.values,
    "wire_client": wire.client,
    "wire_server": wire.server,
    "line": wire.line,
    "replay": wire.replay,
    "sandbox_messages": wire.messages,
    "driver_frames": contexts.driver_frames,
    "cells": contexts.cells,
    "file_helper": files.replies,
}

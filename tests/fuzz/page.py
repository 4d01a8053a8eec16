"""Generate docs/reference/fuzzing.md from results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "results.json"
PAGE: Final = HERE.parents[1] / "docs" / "reference" / "fuzzing.md"

WHAT: Final = {
    "native_plan": "the launcher's decoder of plans, and of plans within them",
    "native_exec_request": "the runner's decoder of a command, its strings, limits and descriptors",
    "native_message": "messages with descriptors over a real socket: no descriptor leaks",
    "native_netlink": "the kernel's netlink replies during network set-up",
    "native_mediated": "system calls that a runner performs for a command: hostile memory",
    "hosts": "allow-lists and hosts: canonical spelling, and no list allows more than its entries",
    "addresses": "IPv4 in every spelling, compared with the C library's parser",
    "http": "HTTP heads of both sides, body lengths, authorities",
    "http_requests": "requests to the host of an `Http` entry, through the whole exchange",
    "http_responses": "responses of such a host, through the whole exchange",
    "http_scrubbing": "a secret in content that is split at any place",
    "http_entries": "`Http` entries and secrets that a client sends to a server",
    "chunked": "chunked bodies, split anywhere, parsed again by the same reader",
    "http_proxy": "a complete client of the HTTP proxy, and the server behind it",
    "socks": "a complete client of the SOCKS5 proxy",
    "dns": "DNS queries: only allowed names get an address",
    "tls": "TLS ClientHello messages, complete, truncated, and in other records",
    "paths": "file paths, parsed and opened in a tree full of links",
    "endpoint": "server addresses, pinned certificates, the caller's proxy",
    "sizes": "memory sizes, processor counts and other quantities",
    "wire_values": "all JSON values of the wire protocol, encoded and decoded",
    "wire_client": "the client side of the wire protocol, against a hostile server",
    "wire_server": "the server side of the wire protocol, against a hostile client",
    "line": "the socket between a local server and its owner, and its handshake",
    "replay": "the run log for a disconnected client: nothing is lost or changed",
    "driver_frames": "messages from the driver of a context: hostile code shares its process",
    "cells": "cells over a server: requests of a client, messages and events of a server",
    "file_helper": "replies of the helper that performs file calls inside a sandbox",
    "sandbox_messages": "messages from a sandbox whose first process is compromised",
}

TEXT: Final = """\
# Fuzzing

Every parser of untrusted bytes has a fuzz target in `tests/fuzz`. The launcher's decoders, in C,
run under libFuzzer with the address and undefined-behaviour sanitizers. The Python parsers run
under atheris, which also uses libFuzzer. A target checks more than crashes: it asserts invariants,
such as "every dialled host was allowed" or "parsing is idempotent", and keeps each input that
violates one.

`make fuzz SECONDS=600` runs each target for ten minutes, one after the other, and stores new inputs
and crashes below `.cache/fuzz`. `make test-all` runs the whole corpus, all inputs that
ever failed, and a fixed set of several thousand mutations.

`make fuzz RECORD=1` generates this table from `tests/fuzz/results.json`.

{table}

{total:,} executions in total; {broken}. {versions}.
"""


def render(results: dict[str, Any]) -> str:
    """Return the page for these results."""
    rows = ["| target | input | executions | minutes | date |", "|---|---|---:|---:|---|"]
    found = results["targets"]
    for name, what in WHAT.items():
        if name in found:
            count, minutes = found[name]["executions"], found[name]["seconds"] / 60
            date = found[name]["date"]
            rows.append(f"| `{name}` | {what} | {count:,} | {minutes:.1f} | {date} |")
    broken = sum(result["crashes"] for result in found.values())
    return TEXT.format(
        table="\n".join(rows),
        total=sum(result["executions"] for result in found.values()),
        broken=f"{broken} failures" if broken else "no failures",
        versions=", ".join(f"{name} {number}" for name, number in results["versions"].items()),
    )


def write_page() -> None:
    """Writes the page from the results in the tree."""
    PAGE.write_text(render(json.loads(RESULTS.read_text("utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    write_page()

"""docs/reference/fuzzing.md, made from results.json: no figure on it is typed by hand."""

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
    "native_message": "messages with descriptors over a real socket: none is left open",
    "native_netlink": "the kernel's answers to the set-up of a network",
    "hosts": "allow-lists and hosts: one spelling, and no list allows more than it says",
    "addresses": "IPv4 in every spelling, against the C library's own reading",
    "http": "HTTP heads of both sides, lengths of bodies, authorities",
    "chunked": "bodies in chunks, cut anywhere, read again by the same reader",
    "http_door": "a whole client of the HTTP proxy, and the server behind it",
    "socks": "a whole client of the SOCKS5 door",
    "dns": "queries: no address but for a name that is allowed",
    "tls": "TLS greetings, whole, cut, and in other records",
    "paths": "paths of files, in words and opened in a tree full of links",
    "endpoint": "addresses of servers, certificates to pin, the caller's proxy",
    "sizes": "amounts of memory, processors and the like",
    "wire_values": "everything that the wire carries as JSON, there and back",
    "wire_client": "a remote session's end of the wire, against a hostile server",
    "wire_server": "a server's end of the wire, against a hostile client",
    "line": "a local server's line to its owner, and the greeting on it",
    "replay": "what is kept for a client that was cut off: nothing lost, nothing changed",
    "sandbox_messages": "what a sandbox tells the host, should its first process be taken over",
}

TEXT: Final = """\
# Fuzzing

Whatever reads bytes that somebody else wrote has a fuzz target in `tests/fuzz`. The launcher's
decoders, in C, run under libFuzzer with the address and undefined-behaviour sanitizers. The
parsers in Python run under atheris, which drives libFuzzer too. A target does more than wait for a
crash: it states what must hold, such as "what is dialled was allowed" or "read again it is the
same", and an input that breaks that is kept.

`make fuzz SECONDS=600` gives each target ten minutes, one after the other; new inputs and crashes
are kept below `.cache/fuzz`. `make test` runs every input of the corpus and every one that ever
broke something, then some thousand mutations of them, the same ones each time.

The table is not written by hand: `make fuzz RECORD=1` makes it from `tests/fuzz/results.json`.

{table}

{total:,} executions in all, on {date}; {broken}. {versions}.
"""


def render(results: dict[str, Any]) -> str:
    """The page that tells these results."""
    rows = ["| target | what it reads | executions | minutes |", "|---|---|---:|---:|"]
    found = results["targets"]
    for name, what in WHAT.items():
        if name in found:
            count, minutes = found[name]["executions"], found[name]["seconds"] / 60
            rows.append(f"| `{name}` | {what} | {count:,} | {minutes:.1f} |")
    broken = sum(result["crashes"] for result in found.values())
    return TEXT.format(
        table="\n".join(rows),
        total=sum(result["executions"] for result in found.values()),
        date=results["date"],
        broken=f"{broken} of the runs broke something" if broken else "nothing broke",
        versions=", ".join(f"{name} {number}" for name, number in results["versions"].items()),
    )


def write_page() -> None:
    """Writes the page from the results in the tree."""
    PAGE.write_text(render(json.loads(RESULTS.read_text("utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    write_page()

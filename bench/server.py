"""A server on loopback: `GET /N` answers with N bytes. A process of its own, for its own lock."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CHUNK = bytes(1 << 20)


class Handler(BaseHTTPRequestHandler):
    """Sends zeros."""

    def do_GET(self) -> None:
        """Answers with as many bytes as the path says."""
        left = int(self.path.lstrip("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(left))
        self.end_headers()
        while left:
            left -= self.wfile.write(CHUNK[:left])

    def log_message(self, *_: object) -> None:
        """A measurement has no log."""


@contextmanager
def server() -> Iterator[int]:
    """The port of a server that runs meanwhile."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("no pipe")
            yield int(process.stdout.readline())
        finally:
            process.kill()


def main() -> None:
    """Serves until it is killed; its first line is the port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        print(listening.server_port, flush=True)
        listening.serve_forever()


if __name__ == "__main__":
    main()

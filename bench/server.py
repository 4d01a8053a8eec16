"""A server on loopback: `GET /N` returns N bytes. A separate process, with its own GIL."""

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
    """Send zeros."""

    def do_GET(self) -> None:
        """Reply with the number of bytes in the path."""
        left = int(self.path.lstrip("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(left))
        self.end_headers()
        while left:
            left -= self.wfile.write(CHUNK[:left])

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def server() -> Iterator[int]:
    """Run a server; yield its port."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("no pipe")
            yield int(process.stdout.readline())
        finally:
            process.kill()


def main() -> None:
    """Serve until killed; print the port as the first line."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        print(listening.server_port, flush=True)
        listening.serve_forever()


if __name__ == "__main__":
    main()

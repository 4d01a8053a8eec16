"""The cost of an intercepted request: ``python -m bench.intercepted``.

A client inside a sandbox sends requests over a kept TLS connection: through an ``Http`` entry with
a credential, through a tunnel, and, without a sandbox, directly. The limits: 0.5 ms and 2.0 times
the tunnel for a small request, 0.4 of the tunnel's rate for 64 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from union import sandbox as sb
from union.sandbox._net.authority import CertificateAuthority

BOUND, PLAIN = "bound.bench.test", "plain.bench.test"
BIG = 64 * 1024 * 1024
MAX_MORE_MS, MAX_TIMES, MIN_RATE = 0.5, 2.0, 0.4
CLIENT = """
import http.client, json, ssl, sys, time
host, address, port, rounds, bundle = sys.argv[1:6]
context = ssl.create_default_context(cafile=bundle or None)
class Connection(http.client.HTTPSConnection):
    def connect(self):
        import socket
        raw = socket.create_connection((address, int(port)))
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = context.wrap_socket(raw, server_hostname=host)
connection = Connection(host, int(port))
taken = []
for number in range(int(rounds) + 20):
    begun = time.perf_counter()
    connection.request("GET", "/small")
    connection.getresponse().read()
    if number >= 20:
        taken.append(time.perf_counter() - begun)
begun = time.perf_counter()
connection.request("GET", "/big")
response, size = connection.getresponse(), 0
while data := response.read(1 << 18):
    size += len(data)
print(json.dumps([taken, size / (time.perf_counter() - begun)]))
"""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self) -> None:
        body = b"x" * (BIG if self.path == "/big" else 100)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""


def serve() -> None:
    """Serve both names, each with its own certificate; print the port and the authority."""
    authority = CertificateAuthority()
    context = authority.context(BOUND)
    other = authority.context(PLAIN)

    def choose(connection: Any, name: str | None, _context: object) -> None:
        if name == PLAIN:
            connection.context = other

    context.sni_callback = choose
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    announcement = {"port": server.server_address[1], "authority": authority.pem.decode()}
    print(json.dumps(announcement), flush=True)
    server.serve_forever()


def resolve_to_loopback() -> None:
    """Make this process resolve both names to loopback."""
    real = socket.getaddrinfo

    def found(host: Any, *rest: Any, **options: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        return real("127.0.0.1" if name in {BOUND, PLAIN} else host, *rest, **options)

    socket.getaddrinfo = found


async def measure(port: int, bundle: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median milliseconds and the rate in MiB/s of each way."""
    secret = sb.Secret("sk-bench-0123456789abcdefghijklmnopqrstuvwxyz")
    entries = {
        "intercepted": (BOUND, sb.Http(f"{BOUND}:{port}", auth=sb.Bearer(secret))),
        "not scrubbed": (BOUND, sb.Http(f"{BOUND}:{port}", auth=sb.Bearer(secret), scrub=False)),
        "tunnelled": (PLAIN, f"{PLAIN}:{port}"),
    }
    samples: dict[str, tuple[list[float], list[float]]] = {
        name: ([], []) for name in (*entries, "bare")
    }
    async with sb.on_device.session(backend="userns") as sbx:
        await sbx.put_bytes("client.py", CLIENT.encode())
        for _ in range(5):
            for name, (host, entry) in entries.items():
                command = ["python", "client.py", host, host, str(port), str(rounds), ""]
                result = await sbx.exec(
                    command,
                    check=True,
                    network_mode="allowlist",
                    network_allowlist=[entry, "127.0.0.1"],
                )
                _add(samples[name], result.stdout)
            argv = [
                sys.executable,
                "-c",
                CLIENT,
                PLAIN,
                "127.0.0.1",
                str(port),
                str(rounds),
                bundle,
            ]
            done = await asyncio.to_thread(
                subprocess.run, argv, capture_output=True, text=True, check=True
            )
            _add(samples["bare"], done.stdout)
    return {
        name: (statistics.median(times) * 1000, statistics.median(rates) / (1 << 20))
        for name, (times, rates) in samples.items()
    }


def _add(samples: tuple[list[float], list[float]], output: str) -> None:
    times, rate = json.loads(output)
    samples[0].extend(times)
    samples[1].append(rate)


def main(arguments: list[str] | None = None) -> int:
    """Print the table; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve()
        return 0
    argv = [sys.executable, "-m", "bench.intercepted", "--serve"]
    with (
        tempfile.TemporaryDirectory() as place,
        subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            announced = json.loads(server.stdout.readline())
            bundle = Path(place, "authority.pem")
            bundle.write_text(announced["authority"], encoding="utf-8")
            bundle.chmod(0o644)
            Path(place).chmod(0o755)
            os.environ["SSL_CERT_FILE"] = str(bundle)
            resolve_to_loopback()
            found = asyncio.run(measure(announced["port"], str(bundle), options.rounds))
        finally:
            server.terminate()
    print(f"{'way':14} {'ms':>8} {'MiB/s':>8}")
    for name, (taken, rate) in found.items():
        print(f"{name:14} {taken:8.3f} {rate:8.0f}")
    (ours, rate), (tunnel, tunnel_rate) = found["intercepted"], found["tunnelled"]
    more = f"{ours - tunnel:.3f} ms more, {ours / tunnel:.2f} times"
    print(f"{more}, {rate / tunnel_rate:.2f} of the rate")
    is_within = ours - tunnel <= MAX_MORE_MS and ours / tunnel <= MAX_TIMES
    return 0 if is_within and rate / tunnel_rate >= MIN_RATE else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The TLS server name is checked in every ClientHello that a server could accept."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from typing import TYPE_CHECKING

import pytest
from tests.net.harness import read_all, rules, serving

if TYPE_CHECKING:
    from pathlib import Path

ALERT = bytes.fromhex("1503010002015a")
CIPHER_CHANGE = bytes.fromhex("140301000101")
HEARTBEAT = bytes.fromhex("180301000401000100")
APPLICATION = bytes.fromhex("170301000100")
# Both have the same length, so that one can replace the other in a ClientHello.
ALLOWED, HIDDEN = "ok.example", "no.example"


def start_client(name):
    """Return a client between two buffers, after its first ClientHello."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    handshake(client)
    return client, incoming, outgoing


def handshake(side):
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return
    except ssl.SSLError:
        return


def client_hello(name):
    return start_client(name)[2].read()


def with_version(data, major):
    return data[:1] + bytes((major,)) + data[2:]


def cut_into_records(data, size):
    body = data[5:]
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(data[:3] + len(piece).to_bytes(2, "big") + piece for piece in pieces)


def payloads(data):
    joined = b""
    while len(data) >= 5:
        size = 5 + int.from_bytes(data[3:5], "big")
        joined += data[5:size]
        data = data[size:]
    return joined


class LenientServer:
    """Skip records before the ClientHello and accept any version, as some servers do."""

    def __init__(self):
        self.seen = []

    async def __call__(self, reader, writer):
        data = b""
        while piece := await reader.read(65536):
            data += piece
            # The name may span records: compare without their headers.
            joined = data + payloads(data)
            self.seen += [name for name in (ALLOWED, HIDDEN) if name.encode() in joined]
            writer.write(b"answer")
            await writer.drain()


async def send_through_tunnel(harness, port, pieces):
    reader, writer = await harness.connect("http")
    writer.write(f"CONNECT {ALLOWED}:{port} HTTP/1.1\r\n\r\n".encode())
    assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 40)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0.02)
    writer.write_eof()
    answer = await asyncio.wait_for(read_all(reader), 40)
    writer.close()
    return answer


ATTACKS = {
    "the other name alone": lambda hello: [hello],
    "after a warning alert": lambda hello: [ALERT, hello],
    "together with a warning alert": lambda hello: [ALERT + hello],
    "after a cipher change": lambda hello: [CIPHER_CHANGE, hello],
    "after a heartbeat": lambda hello: [HEARTBEAT, hello],
    "after application data": lambda hello: [APPLICATION, hello],
    "the alert byte by byte": lambda hello: [*(bytes((b,)) for b in ALERT), hello],
    "an unusual record version": lambda hello: [with_version(hello, 5)],
    "an unusual version, in small records": lambda hello: [
        with_version(cut_into_records(hello, 8), 5)
    ],
    "an alert of an unusual version": lambda hello: [with_version(ALERT, 2) + hello],
    "in several records": lambda hello: [cut_into_records(hello, 100)],
    "byte by byte": lambda hello: [bytes((b,)) for b in hello[:20]] + [hello[20:]],
    "after an allowed ClientHello": lambda hello: [client_hello(ALLOWED), hello],
    "after an allowed ClientHello and early data": lambda hello: [
        client_hello(ALLOWED) + CIPHER_CHANGE + APPLICATION,
        CIPHER_CHANGE + hello,
    ],
    "in the record of an allowed ClientHello": lambda hello: [
        in_one_record(client_hello(ALLOWED), hello)
    ],
}


def in_one_record(first, second):
    body = first[5:] + second[5:]
    return first[:3] + len(body).to_bytes(2, "big") + body


@pytest.mark.threat(163)
@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_refused_server_name_does_not_reach_a_lenient_server(open_egress, attack):
    server_under_test = LenientServer()
    async with serving(server_under_test) as port:
        harness = open_egress(rules([ALLOWED, "127.0.0.0/8"]), table={ALLOWED: ["127.0.0.1"]})
        pieces = ATTACKS[attack](client_hello(HIDDEN))
        with contextlib.suppress(ConnectionError):
            await send_through_tunnel(harness, port, pieces)
        assert HIDDEN not in server_under_test.seen
        await harness.aclose()
        assert not harness.decisions[-1].allowed
        # Control: sent directly, the same bytes deliver the name to the server.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 40)
        writer.close()
        assert HIDDEN in server_under_test.seen


@pytest.fixture
def certificate(tmp_path: Path):
    if shutil.which("openssl") is None:
        pytest.fail("openssl is not installed: apt-get install openssl")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "3",
         "-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=server_under_test"],
        cwd=tmp_path, check=True, capture_output=True,
    )  # fmt: skip
    return tmp_path / "cert.pem", tmp_path / "key.pem"


class RetryingServer:
    """A real TLS server that requests a second ClientHello from every client."""

    def __init__(self, certificate):
        self.seen = []
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(*certificate)
        self.context.set_ecdh_curve("secp384r1")
        self.context.sni_callback = lambda _socket, name, _context: self.seen.append(name)

    async def __call__(self, reader, writer):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self.context.wrap_bio(incoming, outgoing, server_side=True)
        while data := await reader.read(65536):
            incoming.write(data)
            handshake(server)
            writer.write(outgoing.read())
            await writer.drain()


async def second_client_hello(reader, writer, name):
    """Start with the allowed name and change it in the second ClientHello."""
    client, incoming, outgoing = start_client(ALLOWED)
    writer.write(outgoing.read())
    incoming.write(await asyncio.wait_for(reader.read(65536), 40))
    handshake(client)
    second = outgoing.read()
    assert ALLOWED.encode() in second, "control: the server requested it"
    writer.write(second.replace(ALLOWED.encode(), name.encode()))
    await writer.drain()
    try:
        return await asyncio.wait_for(reader.read(65536), 40)
    except ConnectionResetError:
        return b""


@pytest.mark.threat(163)
async def test_the_name_in_a_second_client_hello_is_checked(open_egress, certificate):
    """Some servers select the host by the second ClientHello. The first case is the control."""
    server_under_test = RetryingServer(certificate)
    async with serving(server_under_test) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await second_client_hello(reader, writer, HIDDEN)
        assert server_under_test.seen == [ALLOWED, HIDDEN], (
            "control: the server receives both names"
        )
        writer.close()
        server_under_test.seen.clear()
        harness = open_egress(rules([ALLOWED, "127.0.0.0/8"]), table={ALLOWED: ["127.0.0.1"]})
        for name, wanted in ((ALLOWED, [ALLOWED] * 2), (HIDDEN, [ALLOWED])):
            reader, writer = await harness.connect("http")
            writer.write(f"CONNECT {ALLOWED}:{port} HTTP/1.1\r\n\r\n".encode())
            assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 40)
            assert bool(await second_client_hello(reader, writer, name)) == (name == ALLOWED)
            writer.close()
            assert server_under_test.seen == wanted
            server_under_test.seen.clear()


async def test_protocols_whose_first_bytes_resemble_tls_pass(open_egress):
    """Length-prefixed protocols: a length of 0x0116 or 0x0115 looks like a record type."""

    async def answer(reader, writer):
        writer.write(b"%d" % len(await reader.readexactly(0x115)))

    async with serving(answer) as port:
        harness = open_egress(rules([ALLOWED, "127.0.0.0/8"]), table={ALLOWED: ["127.0.0.1"]})
        for first in (0x14, 0x15, 0x16, 0x17, 0x18):
            message = bytes((first, 1, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0)).ljust(0x115, b"x")
            assert await send_through_tunnel(harness, port, [message]) == b"277"

"""A TLS server with its own authority, and clients that reach it through an egress."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.net.harness import EgressHarness, read_all, rules

from union import sandbox as sb
from union.sandbox._net.interception import Interception

HOST = "api.test"
TOKEN = "sk-proj-" + "Tr0ub4dor+3/staple=" + "x" * 20


def make_certificate(names, directory):
    """Make an authority and a server certificate; return the paths of both."""
    now = dt.datetime.now(dt.UTC)
    issuer_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stub authority")])

    def builder(subject, public):
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=1))
            .not_valid_after(now + dt.timedelta(days=2))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        )

    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "encipher_only", "decipher_only"), False,
    )  # fmt: skip
    authority = (
        builder(issuer, issuer_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(digital_signature=False, key_cert_sign=True, crl_sign=True, **usage),
            critical=True,
        )
        .sign(issuer_key, hashes.SHA256())
    )
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    leaf = (
        builder(subject, key.public_key())
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(identifier, critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    ca, chain = Path(directory, "stub-ca.pem"), Path(directory, "stub.pem")
    ca.write_bytes(authority.public_bytes(pem))
    chain.write_bytes(
        leaf.public_bytes(pem)
        + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    ca.chmod(0o644)
    return ca, chain


@dataclass
class Seen:
    """One request that the stub has received."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def values(self, name):
        return [value for key, value in self.headers if key == name]

    def value(self, name):
        (found,) = self.values(name)
        return found


@dataclass
class Stub:
    """The stub server: received requests, and the responses to send, raw."""

    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    respond: object = None

    async def handle(self, reader, writer):
        self.connections += 1
        while head := await reader.readuntil(b"\r\n\r\n"):
            first, *lines = head[:-4].decode("latin-1").split("\r\n")
            method, target, _ = first.split(" ")
            fields = [tuple(line.split(": ", 1)) for line in lines]
            seen = Seen(method, target, fields)
            self.seen.append(seen)
            if seen.values("content-length"):
                seen.body = await reader.readexactly(int(seen.value("content-length")))
            elif seen.values("transfer-encoding"):
                while size := int(await reader.readline(), 16):
                    seen.body += (await reader.readexactly(size + 2))[:-2]
                await reader.readline()
            if await self.answer(seen, reader, writer) is False:
                return

    async def answer(self, seen, reader, writer):
        if self.respond is not None:
            result = self.respond(seen)
            if asyncio.iscoroutine(result):
                result = await result
            if callable(result):
                return await result(reader, writer)
            writer.write(result)
        else:
            writer.write(ok(b"hello"))
        await writer.drain()
        return None


def ok(body, *fields):
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"HTTP/1.1 200 OK\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def serve_stub(chain):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    stub = Stub()

    async def handle(reader, writer):
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError):
            await stub.handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    stub.port = server.sockets[0].getsockname()[1]
    try:
        yield stub
    finally:
        server.close()


class Gate:
    """An egress with one Http entry for the stub, and clients of its HTTP proxy."""

    def __init__(self, stub, **options):
        auth = options.pop("auth", sb.Bearer(sb.Secret(TOKEN)))
        more = options.pop("also", [])
        deny = options.pop("deny", [])
        self.stub = stub
        self.http = sb.Http(f"{HOST}:{stub.port}", auth=auth, **options)
        self.interception = Interception()
        self.harness = EgressHarness(
            rules([self.http, "127.0.0.1", *more], deny),
            table={HOST: ["127.0.0.1"], "front.test": ["127.0.0.1"]},
            interception=lambda: self.interception,
        )
        self.requests = self.harness.requests
        self.decisions = self.harness.decisions

    @property
    def token(self):
        return self.http.auth.secret

    def client_context(self):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(cadata=self.interception.prepare().pem.decode())
        return context

    async def connect(self, *, server_name=HOST, host=HOST, port=None, context=None):
        """Open a TLS connection through CONNECT; return reader and writer."""
        reader, writer = await self.harness.connect("http")
        target = f"{host}:{port or self.stub.port}"
        writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        line = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in line, line
        await writer.start_tls(context or self.client_context(), server_hostname=server_name)
        return reader, writer

    async def send(self, data, **options):
        """Send raw bytes in one TLS connection; return all that comes back."""
        reader, writer = await self.connect(**options)
        writer.write(data)
        await writer.drain()
        try:
            return await asyncio.wait_for(read_all(reader), 40)
        finally:
            writer.close()

    async def get(self, path="/v1/models", *fields, method="GET", body=b"", **options):
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
        if body:
            lines += f"Content-Length: {len(body)}\r\n"
        head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}:{self.stub.port}\r\nConnection: close\r\n"
        return await self.send(f"{head}{lines}\r\n".encode("latin-1") + body, **options)

    async def aclose(self):
        await self.harness.aclose()


@contextlib.asynccontextmanager
async def gate(monkeypatch, **options):
    """Serve a stub, trusted by this process, behind an egress with an Http entry."""
    with tempfile.TemporaryDirectory() as directory:
        ca, chain = make_certificate([HOST, "front.test"], directory)
        monkeypatch.setenv("SSL_CERT_FILE", str(ca))
        async with serve_stub(chain) as stub:
            found = Gate(stub, **options)
            try:
                yield found
            finally:
                await found.aclose()

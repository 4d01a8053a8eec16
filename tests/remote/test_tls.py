"""TLS: a self-signed certificate that clients pin, or one of a certificate authority."""

from __future__ import annotations

import datetime as dt
import ipaddress
import socket
import ssl
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from tests.remote.conftest import remote
from tests.servers import ServerProcess

from union import sandbox as sb
from union.sandbox.server._config import config_from_arguments
from union.sandbox.server._tls import server_context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def pinned() -> Iterator[ServerProcess]:
    with ServerProcess("--tls-self-signed") as server:
        yield server


@pytest.mark.spec("I1", "I2")
async def test_a_pinned_certificate(pinned: ServerProcess):
    base, fragment = pinned.endpoint.split("#")
    assert base.startswith("https://")
    assert fragment.startswith("sha256=")
    for options in ({}, {"endpoint": base, "cert": fragment.replace("=", ":")}):
        async with remote(pinned, **options) as session:
            assert (await session.exec("echo hi")).stdout == "hi\n"
            await session.put_bytes("f", b"x" * 1_000_000)
            assert len(await session.get_bytes("f")) == 1_000_000


@pytest.mark.spec("I1", "I2")
async def test_another_certificate_gets_no_token(pinned: ServerProcess):
    base = pinned.endpoint.split("#")[0]
    before = pinned.log.read_text()
    for endpoint, hint in ((f"{base}#sha256={'00' * 32}", "pinned"), (base, "cert=")):
        async with remote(pinned, endpoint=endpoint, connect_timeout_s=5) as session:
            with pytest.raises(sb.errors.SandboxConnectionError) as caught:
                await session.run("true")
        assert caught.value.code == "certificate"
        assert hint in caught.value.hint
    assert pinned.log.read_text() == before


async def test_plain_http_is_refused(pinned: ServerProcess):
    plain = pinned.endpoint.split("#")[0].replace("https", "http")
    async with remote(pinned, endpoint=plain, connect_timeout_s=0.2) as session:
        with pytest.raises(sb.errors.SandboxConnectionError):
            await session.run("true")


def test_only_tls_1_2_and_1_3_are_accepted(pinned: ServerProcess):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(pinned.address, timeout=10)) as secure:
        assert secure.version() == "TLSv1.3"
    config = config_from_arguments(["--tls-self-signed"], {})
    made, fingerprint = server_context(config)
    assert made is not None
    assert made.minimum_version is ssl.TLSVersion.TLSv1_2
    assert fingerprint != server_context(config)[1], "a new certificate at every start"


@pytest.mark.spec("I1")
async def test_a_certificate_of_an_authority(tmp_path: Path):
    certificate, key = _make(tmp_path)
    with ServerProcess("--tls-cert", str(certificate), "--tls-key", str(key)) as server:
        assert "#" not in server.endpoint
        async with remote(server, cert=str(certificate)) as session:
            assert (await session.exec("echo hi")).stdout == "hi\n"
        async with remote(server, cert=str(tmp_path / "none")) as session:
            with pytest.raises(sb.SandboxUsageError, match="cert"):
                await session.run("true")


def _make(tmp_path: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private

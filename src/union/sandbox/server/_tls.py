"""TLS certificates: from files, or generated at the start and pinned by clients."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
import ssl
import tempfile
from typing import TYPE_CHECKING

from union.sandbox._system import IS_LINUX
from union.sandbox.errors import SandboxUsageError
from union.sandbox.server._secret_files import check_secret_file

if TYPE_CHECKING:
    from union.sandbox.server._config import Config

__all__ = ["server_context"]


def server_context(config: Config) -> tuple[ssl.SSLContext | None, str | None]:
    """Return the TLS context and the fingerprint of the certificate; both None without TLS."""
    if not config.is_tls:
        return None, None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if config.tls_self_signed:
        certificate, key = _self_signed()
        _load(context, certificate + key)
    else:
        check_secret_file("--tls-cert", config.tls_cert or "", is_secret=False)
        check_secret_file("--tls-key", config.tls_key or "", is_secret=True)
        certificate = _read(config.tls_cert or "", "--tls-cert")
        try:
            context.load_cert_chain(config.tls_cert or "", config.tls_key)
        except (OSError, ssl.SSLError) as exc:
            raise SandboxUsageError(
                f"--tls-cert and --tls-key cannot be used: {exc}", argument="--tls-cert"
            ) from exc
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(_first(certificate))).hexdigest()
    return context, f"sha256:{digest}"


def _read(path: str, argument: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as exc:
        raise SandboxUsageError(f"{argument} {path}: {exc}", argument=argument) from exc


def _first(chain: str) -> str:
    """Return the server's own certificate, the first of a chain."""
    begin, end = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    if begin not in chain or end not in chain:
        raise SandboxUsageError("--tls-cert holds no certificate", argument="--tls-cert")
    start = chain.index(begin)
    return chain[start : chain.index(end, start) + len(end)] + "\n"


def _load(context: ssl.SSLContext, pem: str) -> None:
    """Load a key from an anonymous file in memory, so that it is never stored on disk.

    Only Linux has such files.
    """
    if not IS_LINUX:
        # The TLS library reads files only: one that its owner alone can read, for this moment.
        with tempfile.NamedTemporaryFile(prefix="sandbox-tls-") as file:
            file.write(pem.encode())
            file.flush()
            context.load_cert_chain(file.name)
        return
    fd = os.memfd_create("tls", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _self_signed() -> tuple[str, str]:
    """Return a self-signed certificate and its key; clients verify its fingerprint."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "sandbox-server")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=365))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode()

"""The certificate authority of one session. Its keys exist in the memory of this process only."""

from __future__ import annotations

import datetime as dt
import os
import ssl
import threading
import time
from typing import TYPE_CHECKING, Final

from union.sandbox._core.optional_deps import require

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, ExtensionType, KeyUsage, Name

__all__ = ["CertificateAuthority"]

_AUTHORITY_DAYS: Final = 3650
_LEAF_DAYS: Final = 90
_RENEW_S: Final = 30 * 86400
_CLOCK_SKEW: Final = dt.timedelta(days=1)
_DESCRIPTORS: Final = "/dev/fd" if not os.path.isdir("/proc/self/fd") else "/proc/self/fd"


class CertificateAuthority:
    """Issue certificates for the hosts of ``Http`` entries, and keep a TLS context for each.

    Raises:
        MissingExtraError: the package ``cryptography`` is not installed.

    """

    def __init__(self) -> None:
        require("cryptography", extra="secrets", what="an Http entry")
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        self._key = ec.generate_private_key(ec.SECP256R1())
        # One key for all leaves: each of them is in the memory of this process anyway.
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._contexts: dict[str, tuple[float, ssl.SSLContext]] = {}
        self._lock = threading.Lock()
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"sandbox {os.urandom(8).hex()}")]
        )
        usage = _key_usage(signs_certificates=True)
        limits = x509.BasicConstraints(ca=True, path_length=0)
        builder = _builder(name, name, self._key, days=_AUTHORITY_DAYS)
        builder = builder.add_extension(limits, critical=True)
        builder = builder.add_extension(usage, critical=True)
        self._certificate = _signed(builder, self._key, self._key)

    @property
    def pem(self) -> bytes:
        """The certificate of the authority, which is public."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return self._certificate.public_bytes(Encoding.PEM)

    def context(self, host: str) -> ssl.SSLContext:
        """Return the server's TLS context for a host; made at the first use."""
        with self._lock:
            made_at, known = self._contexts.get(host, (0.0, None))
            if known is None or time.monotonic() - made_at > _RENEW_S:
                known = self._new_context(host)
                self._contexts[host] = (time.monotonic(), known)
            return known

    def _new_context(self, host: str) -> ssl.SSLContext:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host[:64])])
        builder = _builder(subject, self._certificate.subject, self._leaf_key, days=_LEAF_DAYS)
        extensions: tuple[tuple[ExtensionType, bool], ...] = (
            (x509.SubjectAlternativeName([x509.DNSName(host)]), False),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_key_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        leaf = _signed(builder, self._leaf_key, self._key)
        key = self._leaf_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        context.set_alpn_protocols(["http/1.1"])
        _load(context, leaf.public_bytes(serialization.Encoding.PEM), key)
        return context


def _load(context: ssl.SSLContext, certificate: bytes, key: bytes) -> None:
    """Load both from pipes: ``ssl`` reads files only, and a key must never be on a disk."""
    readers: list[int] = []
    try:
        for content in (certificate, key):
            reader, writer = os.pipe()
            readers.append(reader)
            # Both are smaller than the buffer of a pipe.
            os.write(writer, content)
            os.close(writer)
        context.load_cert_chain(*(f"{_DESCRIPTORS}/{reader}" for reader in readers))
    finally:
        for reader in readers:
            os.close(reader)


def _key_usage(*, signs_certificates: bool) -> KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _builder(
    subject: Name, issuer: Name, key: EllipticCurvePrivateKey, *, days: int
) -> CertificateBuilder:
    from cryptography import x509

    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(
    builder: CertificateBuilder, own: EllipticCurvePrivateKey, issuer: EllipticCurvePrivateKey
) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    if own is not issuer:
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key())
        builder = builder.add_extension(identifier, critical=False)
    return builder.sign(issuer, hashes.SHA256())

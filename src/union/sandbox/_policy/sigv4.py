"""Sign a request again that a client has signed with AWS Signature Version 4."""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final
from urllib.parse import quote

__all__ = ["CONTENT_DIGEST", "SignatureRefusedError", "sign_again"]

_AUTHORIZATION: Final = re.compile(
    r"AWS4-HMAC-SHA256 Credential=[^/, ]+/(\d{8})/([a-z0-9-]+)/([a-z0-9-]+)/aws4_request, ?"
    r"SignedHeaders=([!-+\--~]+?), ?Signature=[0-9a-f]{64}",
    re.ASCII,
)
_DATE: Final = re.compile(r"\d{8}T\d{6}Z", re.ASCII)
_TOKEN: Final = "x-amz-security-token"  # noqa: S105 - the name of a header
CONTENT_DIGEST: Final = "x-amz-content-sha256"
"""The header with the digest of the body; services other than S3 leave it out."""
_ENCODED_ONCE: Final = frozenset({"s3", "s3express", "s3-outposts", "s3-object-lambda"})
"""Services whose canonical path is the path as sent; for all others it is encoded once more."""


class SignatureRefusedError(ValueError):
    """The request is not signed in a form that can be signed again."""


def sign_again(
    access_key: str,
    secret_key: str,
    session_token: str | None,
    *,
    method: str,
    target: str,
    headers: tuple[tuple[str, str], ...],
    digest: str | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return the headers with a signature of the real key.

    The scope, the signed headers and the digest of the body come from the client's own signature.

    Raises:
        SignatureRefusedError: there is no such signature, the signature is in the query, or the
            body is signed in pieces.

    """
    path, _, query = target.partition("?")
    if "x-amz-signature" in query.lower() or "x-amz-credential" in query.lower():
        raise SignatureRefusedError("presigned URLs are not accepted")
    given = [value for key, value in headers if key == "authorization"]
    match = _AUTHORIZATION.fullmatch(given[0]) if len(given) == 1 else None
    if match is None:
        raise SignatureRefusedError("the request has no AWS Signature Version 4")
    date, region, service, signed = match.groups()
    kept = tuple((key, value) for key, value in headers if key not in {"authorization", _TOKEN})
    names = {name for name in signed.split(";") if name != _TOKEN}
    if session_token is not None:
        kept = (*kept, (_TOKEN, session_token))
        names.add(_TOKEN)
    fields: dict[str, str] = {}
    for key, value in kept:
        if key in names:
            if key in fields:
                raise SignatureRefusedError(f"the signed header {key} occurs twice")
            fields[key] = " ".join(value.split())
    missing = names - fields.keys()
    if missing:
        raise SignatureRefusedError(f"the signed header {min(missing)} is not in the request")
    if "host" not in names:
        raise SignatureRefusedError("the header host is not signed")
    ordered = ";".join(sorted(names))
    canonical = "\n".join(
        (
            method,
            path if service in _ENCODED_ONCE else quote(path, safe="/~"),
            _canonical_query(query),
            *(f"{name}:{fields[name]}" for name in sorted(names)),
            "",
            ordered,
            _digest(kept, digest),
        )
    )
    scope = f"{date}/{region}/{service}/aws4_request"
    stamp = next((value for key, value in kept if key == "x-amz-date"), "")
    if _DATE.fullmatch(stamp) is None or not stamp.startswith(date):
        raise SignatureRefusedError("x-amz-date is missing, or differs from the scope")
    to_sign = "\n".join(
        ("AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode("latin-1")).hexdigest())
    )
    signing = f"AWS4{secret_key}".encode()
    for part in (date, region, service, "aws4_request"):
        signing = hmac.digest(signing, part.encode(), "sha256")
    signature = hmac.digest(signing, to_sign.encode(), "sha256").hex()
    value = (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={ordered}, "
        f"Signature={signature}"
    )
    return (*kept, ("authorization", value))


def _digest(headers: tuple[tuple[str, str], ...], digest: str | None) -> str:
    found = [value for key, value in headers if key == CONTENT_DIGEST]
    if not found:
        if digest is None:
            raise SignatureRefusedError("the digest of the body is unknown")
        return digest
    if len(found) > 1 or found[0].startswith("STREAMING-AWS4"):
        raise SignatureRefusedError(
            "the body is signed in pieces (STREAMING-AWS4-HMAC-SHA256-PAYLOAD), which cannot be "
            "signed again"
        )
    return found[0]


def _canonical_query(query: str) -> str:
    pairs = []
    for pair in query.split("&"):
        if pair:
            name, _, value = pair.partition("=")
            pairs.append((name, value))
    return "&".join(f"{name}={value}" for name, value in sorted(pairs))

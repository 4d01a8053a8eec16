"""Where a credential stands in an HTTP request, and how it is put there.

A credential is put by position: whatever the client sent in that place is removed. So there is no
placeholder to find, no body is changed, and a program cannot act as another account.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote, unquote_plus

from union.sandbox._policy.secret import Secret
from union.sandbox._policy.sigv4 import CONTENT_DIGEST, SignatureRefusedError, sign_again
from union.sandbox.errors import PolicyError

__all__ = [
    "Auth",
    "Basic",
    "Bearer",
    "CredentialRefusedError",
    "Header",
    "Headers",
    "Query",
    "ServerSecret",
    "SigV4",
    "is_identity_header",
    "needs_digest",
    "put_credential",
    "secrets_sent",
]

Headers = tuple[tuple[str, str], ...]
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_IDENTITY_HEADERS: Final = frozenset(
    {
        "api-key",
        "authorization",
        "cookie",
        "ocp-apim-subscription-key",
        "private-token",
        "x-amz-security-token",
        "x-api-key",
        "x-auth-token",
        "x-goog-api-key",
    }
)
"""Headers that name an account. With a credential, the client's are removed."""
_REFUSED_NAMES: Final = frozenset(
    {"connection", "content-length", "host", "te", "trailer", "transfer-encoding", "upgrade"}
)


class CredentialRefusedError(ValueError):
    """The credential cannot be put into this request; the text is the reason."""


def is_identity_header(name: str) -> bool:
    """Return whether a header of this lower-case name identifies an account.

    Servers that pass headers as CGI variables read ``_`` as ``-``.
    """
    return name.replace("_", "-") in _IDENTITY_HEADERS


def _checked_secret(value: object, where: str) -> Secret:
    if not isinstance(value, Secret):
        # The value may be the credential itself, so it is not shown.
        raise PolicyError(
            f"{where}: the secret must be an sb.Secret, got {type(value).__name__}",
            argument="secret",
            hint=f"{where}(sb.Secret(...))",
        )
    return value


def _header_value(value: str, where: str) -> str:
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        raise PolicyError(
            f"{where}: the secret has characters that a header cannot carry", argument="secret"
        ) from None
    return value


def _without(headers: Headers, name: str) -> Headers:
    return tuple((key, value) for key, value in headers if key.replace("_", "-") != name)


@dataclass(frozen=True, slots=True)
class Bearer:
    """The header ``Authorization: Bearer <secret>``.

    Args:
        secret: the token.

    """

    secret: Secret

    def __post_init__(self) -> None:
        _header_value(_checked_secret(self.secret, "Bearer").reveal(), "Bearer")


@dataclass(frozen=True, slots=True)
class Header:
    """A header of any name, such as ``x-api-key: <secret>``.

    Args:
        name: the name of the header.
        secret: the credential.
        prefix: text before it, such as ``"token "``. Default: empty.

    """

    name: str
    secret: Secret
    prefix: str = ""

    def __post_init__(self) -> None:
        _header_value(_checked_secret(self.secret, "Header").reveal(), "Header")
        if not isinstance(self.name, str) or _TOKEN.fullmatch(self.name) is None:
            raise PolicyError(f"Header: {self.name!r} is not the name of a header", argument="name")
        if self.name.lower() in _REFUSED_NAMES:
            raise PolicyError(
                f"Header: {self.name!r} frames the request and cannot hold a credential",
                argument="name",
            )
        if not self.prefix.isprintable() or not self.prefix.isascii():
            raise PolicyError("Header: the prefix must be printable ASCII", argument="prefix")


@dataclass(frozen=True, slots=True)
class Basic:
    """The header ``Authorization: Basic``, with a user name and the secret as password.

    Args:
        username: the user name, without a colon.
        secret: the password.

    """

    username: str
    secret: Secret

    def __post_init__(self) -> None:
        _checked_secret(self.secret, "Basic")
        if not isinstance(self.username, str) or ":" in self.username:
            raise PolicyError("Basic: a user name has no colon", argument="username")


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter of the query, such as ``?key=<secret>``.

    Args:
        name: the name of the parameter.
        secret: the credential.

    """

    name: str
    secret: Secret

    def __post_init__(self) -> None:
        _checked_secret(self.secret, "Query")
        if not isinstance(self.name, str) or not self.name or quote(self.name) != self.name:
            raise PolicyError(
                f"Query: {self.name!r} is not a plain parameter name", argument="name"
            )


@dataclass(frozen=True, slots=True)
class SigV4:
    """AWS Signature Version 4. The client signs with placeholders; the request is signed again.

    The secret key is not part of a request, so responses need no scrubbing.

    Args:
        access_key: the access key id, which is not secret.
        secret: the secret access key.
        session_token: the token of temporary credentials. Default None: none.

    """

    access_key: str
    secret: Secret
    session_token: Secret | None = None

    def __post_init__(self) -> None:
        _checked_secret(self.secret, "SigV4")
        if self.session_token is not None:
            _checked_secret(self.session_token, "SigV4")
        if not isinstance(self.access_key, str) or _TOKEN.fullmatch(self.access_key) is None:
            raise PolicyError("SigV4: this is not an access key id", argument="access_key")


@dataclass(frozen=True, slots=True)
class ServerSecret:
    """A credential that the server of the session owns; the client knows only its name.

    The operator stores it with ``sandbox-server --secrets FILE``, or names it in the
    ``credentials`` of a ``SandboxEnvironment``. Host, position and limits are the operator's. An
    ``Http`` entry may narrow them.

    Args:
        name: the name on the server.

    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise PolicyError(
                "ServerSecret: a name has 1 to 100 letters, digits, '.', '_' and '-', got "
                f"{self.name!r:.120}",
                argument="name",
            )


Auth = Bearer | Header | Basic | Query | SigV4 | ServerSecret


def secrets_sent(auth: Auth) -> tuple[Secret, ...]:
    """Return the secrets that are part of a request."""
    if isinstance(auth, ServerSecret):
        return ()
    if not isinstance(auth, SigV4):
        return (auth.secret,)
    return () if auth.session_token is None else (auth.session_token,)


def needs_digest(auth: Auth | None, headers: Headers) -> bool:
    """Return whether the body must be read before the request can be signed."""
    return isinstance(auth, SigV4) and all(name != CONTENT_DIGEST for name, _ in headers)


def put_credential(
    auth: Auth, method: str, target: str, headers: Headers, digest: str | None = None
) -> tuple[str, Headers]:
    """Return target and headers with the credential.

    Args:
        auth: the credential.
        method: the method of the request.
        target: its path with the query.
        headers: its fields, with lower-case names.
        digest: the SHA-256 of the body, for a signature without a header for it. Default None.

    Raises:
        CredentialRefusedError: the credential cannot be put into this request.

    """
    if isinstance(auth, ServerSecret):
        raise CredentialRefusedError("the credential is on a server, and this session is not")
    if isinstance(auth, SigV4):
        return target, _signed_again(auth, method, target, headers, digest)
    if isinstance(auth, Query):
        return _with_parameter(auth, target), headers
    name, value = _header_field(auth)
    return target, (*_without(headers, name.replace("_", "-")), (name, value))


def _header_field(auth: Bearer | Header | Basic) -> tuple[str, str]:
    secret = auth.secret.reveal()
    if isinstance(auth, Header):
        return auth.name.lower(), auth.prefix + secret
    if isinstance(auth, Bearer):
        return "authorization", f"Bearer {secret}"
    pair = base64.b64encode(f"{auth.username}:{secret}".encode()).decode()
    return "authorization", f"Basic {pair}"


def _with_parameter(auth: Query, target: str) -> str:
    path, _, query = target.partition("?")
    if ";" in query:
        raise CredentialRefusedError(
            "the query contains ';', which some servers read as a separator"
        )
    kept = [
        pair
        for pair in query.split("&")
        # Frameworks read name[] and name[x] as the same parameter.
        if pair and unquote_plus(pair.partition("=")[0]).partition("[")[0] != auth.name
    ]
    kept.append(f"{auth.name}={quote(auth.secret.reveal(), safe='')}")
    return f"{path}?{'&'.join(kept)}"


def _signed_again(
    auth: SigV4, method: str, target: str, headers: Headers, digest: str | None
) -> Headers:
    token = auth.session_token
    try:
        return sign_again(
            auth.access_key,
            auth.secret.reveal(),
            None if token is None else token.reveal(),
            method=method,
            target=target,
            headers=headers,
            digest=digest,
        )
    except SignatureRefusedError as exc:
        raise CredentialRefusedError(str(exc)) from exc

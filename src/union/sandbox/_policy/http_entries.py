"""``Http``: an allow-list entry for the requests to one host, with rules and a credential."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

from union.sandbox._policy.addresses import format_host_port, looks_numeric
from union.sandbox._policy.credentials import (
    Auth,
    Basic,
    Bearer,
    Header,
    Query,
    ServerSecret,
    SigV4,
    secrets_sent,
)
from union.sandbox._policy.names import NameSyntaxError, normalise_name
from union.sandbox.errors import PolicyError

if TYPE_CHECKING:
    from union.sandbox._policy.entries import Entry
    from union.sandbox._policy.secret import Secret

__all__ = [
    "Http",
    "HttpRule",
    "RequestVerdict",
    "covers",
    "decide_request",
    "path_problem",
    "texts_of",
]

_RULE: Final = re.compile(r"(\*|[A-Z]+) (/[\x21-\x7e]*)", re.ASCII)
_METHOD: Final = re.compile(r"[A-Z]{1,32}", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_AMBIGUOUS: Final = re.compile(
    r"//|\\|/\.{1,2}(?:[/;]|$)|%(?:2e|2f|5c|25|[01][0-9a-f]|7f)|#|%(?![0-9a-fA-F]{2})",
    re.IGNORECASE | re.ASCII,
)
"""Paths that two programs read differently: empty and dot segments, backslashes, and encoded
separators, dots, control characters and percent signs."""
_STRUCTURE: Final = frozenset("./\\%?#;")
_MAX_PATH_CHARS: Final = 8192
_MIN_SCRUBBED: Final = 8
"""Shorter secrets occur by chance, so that replacing them would change other content."""
_AUTHS: Final = (Bearer, Header, Basic, Query, SigV4, ServerSecret)
_ACCEPTED_RULE: Final = (
    "a rule is a method or '*', a space, and a path: 'GET /v1/models', 'POST /repos/*/issues', "
    "'* /v1/**'. In a path, '*' matches within one segment, and '**' at the end all that follows"
)
NEVER_ALLOWED: Final = frozenset({"CONNECT", "TRACE", "TRACK", "DEBUG", "PRI"})
"""Methods whose response repeats the request, or that open a tunnel."""


@dataclass(frozen=True, slots=True)
class HttpRule:
    """One rule: a method and a pattern for the path."""

    text: str
    method: str
    pattern: re.Pattern[str]

    def matches(self, method: str, path: str) -> bool:
        """Return whether the rule allows this request."""
        return self.method in {"*", method} and self.pattern.fullmatch(path) is not None


class Http:
    """An allow-list entry for HTTPS requests to one host: rules, budgets, and a credential.

    The host is reachable by HTTP only. TLS of the sandbox ends in this process, each request is
    checked, gets the credential, and continues over verified TLS. Plain HTTP to port 80 is
    accepted as well and upgraded. Budgets count per entry: use one entry in several calls for a
    common budget.

    Args:
        host: a DNS name, with an optional ``:port``. The default port is 443.
        auth: the credential: ``Bearer``, ``Header``, ``Basic``, ``Query`` or ``SigV4``, or the name
            of one that the server of the session owns, ``ServerSecret``. Default None: none; the
            client's own headers are forwarded.
        allow: rules such as ``"GET /v1/models"`` or ``"* /repos/acme/**"``. In a path, ``*``
            matches within one segment, and ``**`` at the end all that follows. Default None: every
            request.
        env: name of a variable that gets the placeholder of the secret. Default None: none.
        max_requests: requests that may be sent to the host. Default None: no limit.
        max_bytes_up: total bytes of request bodies. Default None: no limit.
        max_bytes_down: total bytes of response bodies. Default None: no limit.
        scrub: whether the secret is replaced by its placeholder in responses. Default True.
        websockets: whether requests may upgrade to a WebSocket. Default False.

    Raises:
        PolicyError: an argument is invalid.

    """

    __slots__ = (
        "__weakref__",
        "allow",
        "auth",
        "env",
        "host",
        "is_stored",
        "max_bytes_down",
        "max_bytes_up",
        "max_requests",
        "port",
        "rules",
        "scrub",
        "websockets",
        "within",
    )

    def __init__(
        self,
        host: str,
        *,
        auth: Auth | None = None,
        allow: Sequence[str] | None = None,
        env: str | None = None,
        max_requests: int | None = None,
        max_bytes_up: int | None = None,
        max_bytes_down: int | None = None,
        scrub: bool = True,
        websockets: bool = False,
    ) -> None:
        self.host, self.port = _host_and_port(host)
        if auth is not None and not isinstance(auth, _AUTHS):
            raise PolicyError(
                "Http: auth must be Bearer, Header, Basic, Query, SigV4 or ServerSecret, got "
                f"{type(auth).__name__}",
                argument="auth",
                hint="for a token in the Authorization header: auth=sb.Bearer(sb.Secret(...))",
            )
        self.auth = auth
        self.rules = None if allow is None else _rules(allow)
        self.allow = None if self.rules is None else tuple(rule.text for rule in self.rules)
        if env is not None:
            if auth is None:
                raise PolicyError("Http: env needs auth", argument="env")
            if not isinstance(env, str) or _VARIABLE.fullmatch(env) is None:
                raise PolicyError(f"Http: {env!r} is not the name of a variable", argument="env")
        self.env = env
        self.max_requests = _limit("max_requests", max_requests)
        self.max_bytes_up = _limit("max_bytes_up", max_bytes_up)
        self.max_bytes_down = _limit("max_bytes_down", max_bytes_down)
        for name, flag in (("scrub", scrub), ("websockets", websockets)):
            if not isinstance(flag, bool):
                raise PolicyError(f"Http: {name} must be True or False", argument=name)
        if scrub and auth is not None:
            for secret in secrets_sent(auth):
                if len(secret.placeholder) < _MIN_SCRUBBED:
                    raise PolicyError(
                        f"Http: a secret of fewer than {_MIN_SCRUBBED} characters occurs in "
                        "responses by chance and cannot be scrubbed",
                        argument="scrub",
                        hint="use a longer secret, or scrub=False",
                    )
        self.scrub = scrub
        self.websockets = websockets
        self.is_stored = False
        """Whether a server owns the credential: its value is unknown to the caller."""
        self.within: Http | None = None
        """A wider entry whose budgets count too: set by a server for an entry that narrows one."""

    @property
    def variables(self) -> tuple[tuple[str, str], ...]:
        """Variables of programs inside, with placeholders as their values."""
        if self.env is None or self.auth is None or isinstance(self.auth, ServerSecret):
            return ()
        return ((self.env, self.auth.secret.placeholder),)

    @property
    def callers_secret(self) -> Secret | None:
        """The secret that the caller passed; None if there is none, or if a server owns it."""
        if self.auth is None or isinstance(self.auth, ServerSecret) or self.is_stored:
            return None
        return self.auth.secret

    @property
    def place(self) -> str:
        """The host, with the port unless it is that of HTTPS."""
        return format_host_port(self.host, None if self.port == 443 else self.port)

    @property
    def text(self) -> str:
        """The entry as records and messages show it."""
        return f"Http({self.place!r})"

    def __repr__(self) -> str:
        shown = [repr(self.place)]
        if self.auth is not None:
            shown.append(f"auth={type(self.auth).__name__}(***)")
        if self.allow is not None:
            shown.append(f"allow={list(self.allow)!r}")
        return f"Http({', '.join(shown)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVerdict:
    """The decision about one request."""

    allowed: bool
    reason: str
    suggestion: str = ""


def decide_request(http: Http, method: str, path: str) -> RequestVerdict:
    """Decide about a request by its method and its path, which has no query."""
    if method in NEVER_ALLOWED:
        return RequestVerdict(allowed=False, reason=f"the method {method} is never forwarded")
    if _METHOD.fullmatch(method) is None:
        return RequestVerdict(allowed=False, reason="the method is not in upper-case letters")
    problem = path_problem(path)
    if problem:
        return RequestVerdict(allowed=False, reason=problem)
    if http.rules is None:
        return RequestVerdict(allowed=True, reason=f"allowed by {http.text}")
    for rule in http.rules:
        if rule.matches(method, path):
            return RequestVerdict(allowed=True, reason=f"allowed by {rule.text!r}")
    return RequestVerdict(
        allowed=False,
        reason=f"no rule of {http.text} allows {method} {path}",
        suggestion=f"{method} {path}",
    )


def path_problem(path: str) -> str:
    """Return why servers may read this path differently; empty for a plain one."""
    if not path.startswith("/") or len(path) > _MAX_PATH_CHARS:
        return f"the path does not begin with '/', or exceeds {_MAX_PATH_CHARS} characters"
    if _AMBIGUOUS.search(path) is not None:
        return (
            "the path is ambiguous: it has an empty or dot segment, a backslash, or an encoded "
            "separator"
        )
    if "%" not in path:
        return ""
    try:
        decoded = unquote_to_bytes(path).decode()
    except UnicodeDecodeError:
        return "the path is ambiguous: its encoded characters are not UTF-8"
    for character in decoded:
        if not character.isascii() and (
            _STRUCTURE.intersection(unicodedata.normalize("NFKC", character))
            or not character.isprintable()
        ):
            return "the path is ambiguous: a character becomes a separator when it is normalised"
    return ""


def texts_of(entries: Iterable[Entry]) -> list[str]:
    """Return the entries as text, for a description that is stored, such as the inputs of a run.

    Raises:
        PolicyError: there is an ``Http`` entry.

    """
    found = []
    for entry in entries:
        if entry.http is not None:
            raise PolicyError(
                f"network_allowlist: {entry.text} cannot be part of a session whose description is "
                "stored with the inputs of a run",
                argument="network_allowlist",
                hint="pass it to each run() or cell; the session may list the host by name",
            )
        found.append(entry.text)
    return found


def covers(wide: Http, narrow: Http) -> bool:
    """Return whether ``narrow`` allows nothing beyond ``wide``."""
    if wide is narrow:
        return True
    if (wide.host, wide.port) != (narrow.host, narrow.port) or wide.auth != narrow.auth:
        return False
    if (narrow.websockets and not wide.websockets) or (wide.scrub and not narrow.scrub):
        return False
    for name in ("max_requests", "max_bytes_up", "max_bytes_down"):
        ceiling, requested = getattr(wide, name), getattr(narrow, name)
        if ceiling is not None and (requested is None or requested > ceiling):
            return False
    if wide.rules is None:
        return True
    if narrow.rules is None:
        return False
    return all(any(_rule_covers(w, n) for w in wide.rules) for n in narrow.rules)


def _rule_covers(wide: HttpRule, narrow: HttpRule) -> bool:
    if wide.method not in {"*", narrow.method}:
        return False
    path = narrow.text.partition(" ")[2]
    if path == wide.text.partition(" ")[2]:
        return True
    # A pattern that has a wildcard itself is covered only where '**' covers everything below.
    if "*" in path:
        stem = wide.text.partition(" ")[2]
        return stem.endswith("/**") and "*" not in stem[:-2] and path.startswith(stem[:-2])
    return wide.pattern.fullmatch(path) is not None


def _host_and_port(host: object) -> tuple[str, int]:
    if not isinstance(host, str) or not host:
        raise PolicyError(
            f"Http: the host must be a DNS name, got {type(host).__name__}", argument="host"
        )
    hint = "an Http entry is for one DNS name, such as 'api.example.com' or 'api.example.com:8443'"
    if "://" in host or "/" in host:
        raise PolicyError(f"Http: {host!r} is a URL, not a host", argument="host", hint=hint)
    name, colon, digits = host.partition(":")
    if colon and not (digits.isascii() and digits.isdigit() and 1 <= int(digits) <= 65535):
        raise PolicyError(
            f"Http: the port of {host!r} must be a number from 1 to 65535",
            argument="host",
            hint=hint,
        )
    if "*" in name:
        raise PolicyError(f"Http: {host!r} is a pattern", argument="host", hint=hint)
    try:
        name = normalise_name(name)
    except NameSyntaxError as exc:
        raise PolicyError(f"Http: the host {host!r} {exc}", argument="host", hint=hint) from exc
    if looks_numeric(name):
        raise PolicyError(f"Http: {host!r} is an address", argument="host", hint=hint)
    return name, int(digits) if colon else 443


def _rules(allow: object) -> tuple[HttpRule, ...]:
    if isinstance(allow, str) or not isinstance(allow, Sequence):
        raise PolicyError(
            f"Http: allow must be a list of rules, got {type(allow).__name__}",
            argument="allow",
            hint=_ACCEPTED_RULE,
        )
    return tuple(_rule(item) for item in allow)


def _rule(text: object) -> HttpRule:
    match = _RULE.fullmatch(text) if isinstance(text, str) else None
    if match is None or not isinstance(text, str):
        raise PolicyError(
            f"Http: {text!r:.120} is not a rule", argument="allow", hint=_ACCEPTED_RULE
        )
    method, path = match.groups()
    if method in NEVER_ALLOWED:
        raise PolicyError(f"Http: the method {method} is never forwarded", argument="allow")
    stem = path.removesuffix("**")
    if "?" in path or "***" in path or any(segment.count("*") > 1 for segment in stem.split("/")):
        # One wildcard per segment: matching stays linear in the length of a hostile path.
        raise PolicyError(
            f"Http: the rule {text!r} has a query, two '*' in one segment, or '**' before its end",
            argument="allow",
            hint=_ACCEPTED_RULE,
        )
    problem = path_problem(path.replace("*", "x"))
    if problem:
        raise PolicyError(
            f"Http: the rule {text!r} can match nothing: {problem}",
            argument="allow",
            hint=_ACCEPTED_RULE,
        )
    parts = re.split(r"(\*{1,2})", path)
    wildcards = {"*": "[^/]*", "**": ".*"}
    pattern = "".join(wildcards.get(part, re.escape(part)) for part in parts)
    return HttpRule(text=text, method=method, pattern=re.compile(pattern, re.DOTALL))


def _limit(name: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PolicyError(
            f"Http: {name} must be a whole number or None, not {value!r:.80}", argument=name
        )
    return value

"""Http entries, rules and credentials, without any network."""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
import pickle
import traceback

import pytest

from union import sandbox as sb
from union.sandbox._codecs.scrubber import Scrubber, ScrubTable
from union.sandbox._policy.ceiling import check_narrower
from union.sandbox._policy.credentials import (
    CredentialRefusedError,
    needs_digest,
    put_credential,
    secrets_sent,
)
from union.sandbox._policy.entries import parse_entries
from union.sandbox._policy.hints import network_hint
from union.sandbox._policy.http_entries import covers, decide_request, path_problem, texts_of

pytestmark = pytest.mark.spec("M1", "M2")

VALUE = "sk-proj-Tr0ub4dor3staple0123456789"


def shown(value):
    """Return everything that common tools print about a value."""
    texts = [repr(value), str(value), f"{value}", f"{value!s:>40}", "%s" % value]  # noqa: UP031
    if dataclasses.is_dataclass(value):
        texts.append(repr(dataclasses.asdict(value)))
    try:
        json.dumps(value)
    except TypeError as exc:
        texts.append(str(exc))
    return "".join(texts)


@pytest.mark.threat(185)
@pytest.mark.parametrize(
    "make",
    [
        lambda s: s,
        sb.Bearer,
        lambda s: sb.Header("x-api-key", s),
        lambda s: sb.Basic("user", s),
        lambda s: sb.Query("key", s),
        lambda s: sb.SigV4("AKIA", s, session_token=s),
        lambda s: sb.Http("a.test", auth=sb.Bearer(s), env="KEY"),
    ],
)
def test_a_secret_is_shown_copied_and_pickled_nowhere(make):
    value = make(sb.Secret(VALUE))
    assert VALUE not in shown(value)
    with pytest.raises(TypeError):
        pickle.dumps(value)
    if isinstance(value, sb.Secret):
        assert copy.deepcopy(value) is value
        assert copy.copy(value) is value


@pytest.mark.threat(185)
def test_an_error_does_not_quote_the_secret():
    for make in (
        lambda: sb.Bearer(VALUE),
        lambda: sb.Secret(VALUE + "\n"),
        lambda: sb.Secret(VALUE, placeholder="x"),
        lambda: sb.Http("a.test", auth=VALUE),
        lambda: sb.Http("a.test", auth=sb.Secret(VALUE)),
        lambda: parse_entries([sb.Secret(VALUE)], argument="network_allowlist"),
    ):
        with pytest.raises(sb.PolicyError) as caught:
            make()
        assert VALUE not in "".join(traceback.format_exception(caught.value))


def test_a_placeholder_has_length_and_published_prefix_only():
    assert sb.Secret(VALUE).placeholder.startswith("sk-proj-")
    secret = sb.Secret("correct-horse-battery-staple")
    assert len(secret.placeholder) == 28
    assert not secret.placeholder.startswith("correct")
    assert sb.Secret(VALUE).placeholder != sb.Secret(VALUE).placeholder
    assert sb.Secret("ghp_short").placeholder[:4] != "ghp_"
    assert len(sb.Secret("pässwörd-ü").placeholder) == len("pässwörd-ü".encode())


@pytest.mark.parametrize("value", ["", "a\nb", "a\x7fb", "x" * 20_000, 5, "\ud800"])
def test_an_invalid_secret_is_refused(value):
    with pytest.raises(sb.PolicyError):
        sb.Secret(value)


@pytest.mark.parametrize(
    "host", ["", "https://a.test", "a.test/x", "*.a.test", "10.0.0.1", "a.test:0", "a.test:x", 5]
)
def test_an_invalid_host_is_refused(host):
    with pytest.raises(sb.PolicyError):
        sb.Http(host)


@pytest.mark.parametrize(
    "rule",
    ["GET", "/x", "get /x", "GET x", "GET /a?b", "GET /a/***", "GET /a/**/b", "GET /*a*", "TRACE /",
     "GET /a/../b", "GET //", "GET /%2e", 5],
)  # fmt: skip
def test_an_invalid_rule_is_refused(rule):
    with pytest.raises(sb.PolicyError):
        sb.Http("a.test", allow=[rule])


@pytest.mark.parametrize(
    "options",
    [
        {"env": "KEY"},
        {"auth": sb.Bearer(sb.Secret(VALUE)), "env": "NOT A NAME"},
        {"max_requests": -1},
        {"max_bytes_up": 1.5},
        {"scrub": "yes"},
        {"allow": "GET /"},
        {"auth": sb.Bearer(sb.Secret("short"))},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(sb.PolicyError):
        sb.Http("a.test", **options)


def test_the_port_and_the_spelling_of_a_host():
    http = sb.Http("API.Example.COM.:8443")
    assert (http.host, http.port) == ("api.example.com", 8443)
    (entry,) = parse_entries([http, http], argument="network_allowlist")
    assert entry.http is http
    with pytest.raises(sb.PolicyError, match="twice"):
        parse_entries([http, sb.Http("api.example.com:8443")], argument="network_allowlist")
    with pytest.raises(sb.PolicyError):
        parse_entries([http], argument="network_denylist")
    with pytest.raises(sb.PolicyError, match="stored"):
        texts_of([entry])


def test_an_entry_without_rules_allows_every_method_but_echoes():
    http = sb.Http("a.test")
    assert decide_request(http, "GET", "/x").allowed
    for method in ("TRACE", "CONNECT", "PRI", "get", "G T", ""):
        assert not decide_request(http, method, "/x").allowed


def test_wildcards_match_segments():
    http = sb.Http("a.test", allow=["GET /r/*/x", "GET /f*.json", "GET /all/**"])
    allowed = {"/r/a/x", "/fa.json", "/f.json", "/all/", "/all/a/b"}
    for path in {"/r/a/b/x", "/r/x", "/f/a.json", "/all", *allowed}:
        assert decide_request(http, "GET", path).allowed == (path in allowed), path


def test_a_long_hostile_path_is_decided_at_once():
    http = sb.Http("a.test", allow=["GET /*a/*b/*c/**"])
    assert not decide_request(http, "GET", "/" + "a" * 8000).allowed
    assert path_problem("/" + "a" * 9000)


def test_plain_paths_are_accepted():
    for path in ("/", "/a.b/c-d_e~f", "/a/...", "/a/.well-known", "/%20%C3%A9", "/a:b@c", "/a;b=1"):
        assert not path_problem(path), path


def test_a_call_may_only_narrow_an_entry():
    auth = sb.Bearer(sb.Secret(VALUE))
    wide = sb.Http("a.test", auth=auth, allow=["* /v1/**", "GET /x"], max_requests=9)
    for options, expected in (
        ({"allow": ["GET /v1/a"], "max_requests": 9}, True),
        ({"allow": ["POST /v1/a/*"], "max_requests": 1}, True),
        ({"allow": ["GET /x"], "max_requests": 10}, False),
        ({"allow": ["POST /x"], "max_requests": 1}, False),
        ({"max_requests": 1}, False),
        ({"allow": ["GET /x"]}, False),
        ({"allow": ["GET /x"], "max_requests": 1, "scrub": False}, False),
        ({"allow": ["GET /x"], "max_requests": 1, "websockets": True}, False),
    ):
        assert covers(wide, sb.Http("a.test", auth=auth, **options)) == expected, options
    other = sb.Http("a.test", auth=sb.Bearer(sb.Secret(VALUE)), allow=["GET /x"], max_requests=1)
    assert not covers(wide, other)


def test_an_entry_is_narrower_than_a_name():
    from union.sandbox._core.spec import NetworkSpec

    def network(*items):
        allow = parse_entries(list(items), argument="network_allowlist")
        return NetworkSpec(mode="allowlist", allow=allow)

    check_narrower(network(sb.Http("a.test")), ceiling=network("a.test"))
    check_narrower(network(sb.Http("b.a.test")), ceiling=network("*.a.test"))
    for requested in ("a.test", "a.test:443"):
        with pytest.raises(sb.PolicyError):
            check_narrower(network(requested), ceiling=network(sb.Http("a.test")))


# Signature Version 4.


def signed(**changes):
    digest = hashlib.sha256(b"").hexdigest()
    fields = {
        "host": "examplebucket.s3.amazonaws.com",
        "range": "bytes=0-9",
        "x-amz-content-sha256": digest,
        "x-amz-date": "20130524T000000Z",
        "authorization": "AWS4-HMAC-SHA256 "
        "Credential=PLACEHOLDER/20130524/us-east-1/s3/aws4_request, "
        f"SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, Signature={'0' * 64}",
    }
    fields |= changes
    return tuple((name, value) for name, value in fields.items() if value is not None)


def test_the_published_example_of_aws():
    """The first example of the documentation of Signature Version 4 for S3."""
    auth = sb.SigV4("AKIAIOSFODNN7EXAMPLE", sb.Secret("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"))
    _, fields = put_credential(auth, "GET", "/test.txt", signed())
    expected = "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    assert dict(fields)["authorization"].endswith(f"Signature={expected}")
    assert "Credential=AKIAIOSFODNN7EXAMPLE/2013" in dict(fields)["authorization"]


def test_a_session_token_is_added_and_signed():
    token = sb.Secret("temporary-token-of-the-session")
    auth = sb.SigV4("AKIA", sb.Secret(VALUE), session_token=token)
    _, fields = put_credential(auth, "GET", "/", signed(**{"x-amz-security-token": "client's"}))
    assert dict(fields)["x-amz-security-token"] == token.reveal()
    assert ";x-amz-security-token," in dict(fields)["authorization"]
    assert secrets_sent(auth) == (token,)


@pytest.mark.parametrize(
    "target, changes",
    [
        ("/?X-Amz-Signature=0", {}),
        ("/", {"authorization": "Bearer x"}),
        ("/", {"authorization": None}),
        ("/", {"x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD"}),
        ("/", {"x-amz-content-sha256": None}),
        ("/", {"x-amz-date": "20130525T000000Z"}),
        ("/", {"range": None}),
    ],
)
def test_a_request_that_cannot_be_signed_again_is_refused(target, changes):
    with pytest.raises(CredentialRefusedError):
        put_credential(sb.SigV4("AKIA", sb.Secret(VALUE)), "GET", target, signed(**changes))


def test_a_body_without_a_digest_header_is_signed_by_its_digest():
    auth = sb.SigV4("AKIA", sb.Secret(VALUE))
    names = "SignedHeaders=host;x-amz-date"
    given = dict(signed())["authorization"].replace(
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date", names
    )
    fields = signed(**{"x-amz-content-sha256": None, "range": None, "authorization": given})
    assert needs_digest(auth, fields)
    one, other = (
        put_credential(auth, "POST", "/", fields, digest)[1] for digest in ("a" * 64, "b" * 64)
    )
    assert one != other


# Scrubbing.


@pytest.mark.threat(182)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_every_split_of_a_secret_is_found(size):
    secret, other = VALUE.encode(), sb.Secret(VALUE).placeholder.encode()
    table = ScrubTable(((secret, other),))
    content = b"".join(
        b"s" + form + b"sk-" for form in (secret, base64.b64encode(b"u:" + secret), secret[:-1])
    )
    scrubber, out = Scrubber(table), b""
    for at in range(0, len(content), size):
        out += scrubber.feed(content[at : at + size])
    out += scrubber.finish()
    assert len(out) == len(content)
    assert secret not in out
    assert base64.b64encode(b"u:" + secret)[4:-4] not in out
    assert out.endswith(secret[:-1] + b"sk-")


def test_content_without_a_secret_is_unchanged():
    table = ScrubTable(((VALUE.encode(), sb.Secret(VALUE).placeholder.encode()),))
    content = bytes(range(256)) * 50
    scrubber = Scrubber(table)
    assert scrubber.feed(content) + scrubber.finish() == content
    with pytest.raises(ValueError, match="length"):
        ScrubTable(((b"a", b"bc"),))


# Hints.


def result(stderr="", network=(), requests=()):
    return sb.ExecResult(returncode=1, stdout="", stderr=stderr, network=network, requests=requests)


@pytest.mark.parametrize(
    "stderr",
    [
        "curl: (6) Could not resolve host: example.com",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "Error: getaddrinfo EAI_AGAIN example.com",
        "OSError: [Errno 101] Network is unreachable",
    ],
)
def test_a_blocked_network_is_recognised(stderr):
    assert "network_mode='allowlist'" in network_hint("blocked", result(stderr))
    assert not network_hint("open", result(stderr))
    assert not network_hint("blocked", result("ValueError: x"))

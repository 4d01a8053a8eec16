"""Endpoints are parsed strictly; possible secrets are not shown."""

from __future__ import annotations

import pytest

from union.sandbox._wire.endpoint import Endpoint, parse_endpoint, parse_fingerprint
from union.sandbox.errors import SandboxUsageError

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    "text, expected",
    [
        ("http://h:80", Endpoint(base="http://h:80")),
        ("https://h", Endpoint(base="https://h")),
        ("http://[::1]:8080/", Endpoint(base="http://[::1]:8080")),
        ("https://h/prefix/", Endpoint(base="https://h/prefix")),
        ("unix:///run/x.sock", Endpoint(base="http://localhost", socket="/run/x.sock")),
        (
            f"https://h:1#sha256={DIGEST}",
            Endpoint(base="https://h:1", fingerprint=bytes.fromhex(DIGEST)),
        ),
    ],
)
def test_endpoints(text, expected):
    assert parse_endpoint(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "h:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "unix://x", "unix:",
        f"http://h#sha256={DIGEST}", "https://h#sha256=12", "https://h#md5=12", "http://h?q=1",
        None, 80, b"http://h", "unix:///run/a\0b", "ht\ntp://h", "http://a b", " http://h", "http://\udce5",
    ],
)  # fmt: skip
def test_invalid_endpoints(text):
    with pytest.raises(SandboxUsageError) as caught:
        parse_endpoint(text)
    assert caught.value.argument == "endpoint"


def test_a_secret_in_an_endpoint_is_not_shown():
    with pytest.raises(SandboxUsageError) as caught:
        parse_endpoint("http://user:hunter2@h:80")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text, secure",
    [
        ("http://localhost:1", True), ("http://127.0.0.1:1", True), ("http://[::1]:1", True),
        ("unix:///s", True), ("https://example.com", True), ("http://example.com", False),
        ("http://10.0.0.1", False), ("http://127.0.0.1.example.com", False),
    ],
)  # fmt: skip
def test_which_endpoints_are_secure(text, secure):
    assert parse_endpoint(text).is_secure is secure


def test_a_fingerprint():
    assert parse_fingerprint(f"sha256:{DIGEST}", argument="cert") == bytes.fromhex(DIGEST)
    with pytest.raises(SandboxUsageError, match="cert"):
        parse_fingerprint("sha256:zz", argument="cert")

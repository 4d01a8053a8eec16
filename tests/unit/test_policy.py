"""One policy for every frontend: deny entries, allow entries, then the default."""

from __future__ import annotations

import ipaddress
import string
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._policy.rules import (
    NetworkRules,
    decide_address,
    decide_name,
    decide_server_name,
    parse_entries,
    parse_host,
)
from union.sandbox.constants import CLOUD_METADATA_DENY, KUBERNETES_DENY, PYPI_HOSTS


def rules(allow=(), deny=()):
    return NetworkRules(
        allow=None if allow is None else parse_entries(list(allow), argument="network_allowlist"),
        deny=parse_entries(list(deny), argument="network_denylist"),
    )


def allowed(policy, host, port=443):
    return decide_name(policy, host, port).allowed


@pytest.mark.threat(81)
def test_empty_allow_list_allows_nothing():
    assert not allowed(rules([]), "example.com")
    assert not allowed(rules([]), "93.184.215.14")


@pytest.mark.threat(86)
def test_a_pattern_covers_subdomains_at_any_depth_but_not_the_apex():
    policy = rules(["*.example.com"])
    assert allowed(policy, "a.example.com")
    assert allowed(policy, "a.b.example.com")
    assert not allowed(policy, "example.com")


@pytest.mark.threat(86)
@pytest.mark.parametrize(
    "host",
    [
        "evilexample.com",
        "example.com.evil.org",
        "example.comx",
        "xexample.com",
        "exampleXcom",
        "a.evilexample.com",
        "example.co",
        "com",
    ],
)
def test_similar_names_are_refused(host):
    assert not allowed(rules(["example.com", "*.example.com"]), host)


@pytest.mark.threat(85, 87)
@pytest.mark.parametrize(
    "host",
    [
        "EXAMPLE.com",
        "example.com.",
        "Example.COM.",
        "\uff45xample.com",
        "example\u3002com",
        "example\uff0ecom",
        "example\uff61com",
    ],
)
def test_every_spelling_of_a_name_is_the_same_name(host):
    assert allowed(rules(["example.com"]), host)
    assert not allowed(rules(None, ["example.com"]), host)


@pytest.mark.threat(84, 90)
@pytest.mark.parametrize(
    "host",
    [
        "example.com\0.evil.org",
        "evil.org\0.example.com",
        "example.com\r\nx",
        " example.com",
        "example.com\t",
        "user@example.com",
        "example.com/",
        "example.com#x",
        "example.com\\x",
        "example%2ecom",
        "example..com",
        ".example.com",
        "example.com..",
        "",
        ".",
        "[example.com]",
        "[1.2.3.4]",
        "fe80::1%eth0",
        "::1%lo",
        "1.2.3.4.5",
        "1.2.3.256",
        "0x",
        "08.1.1.1",
        "a.1",
        "fa\u00df.de",
        "fa\u1e9e.de",
        "a" * 64 + ".com",
        "\ud800.com",
    ],
)
def test_an_invalid_host_is_refused_even_when_open(host):
    verdict = decide_name(rules(None), host, 80)
    assert not verdict.allowed
    assert verdict.rule == "syntax"


METADATA = [
    "169.254.169.254",
    "169.254.169.254.",
    "0xa9fea9fe",
    "0xA9.0xFE.0xA9.0xFE",
    "2852039166",
    "0251.0376.0251.0376",
    "169.254.43518",
    "169.16689662",
    "\uff11\uff16\uff19.254.169.254",
    "::ffff:169.254.169.254",
    "[::ffff:a9fe:a9fe]",
    "64:ff9b::a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "::a9fe:a9fe",
    "fd00:ec2::254",
    "metadata.google.internal",
    "METADATA.google.internal.",
    "100.100.100.200",
]


@pytest.mark.threat(88, 89, 93)
@pytest.mark.parametrize("host", METADATA)
def test_metadata_is_denied_on_an_open_network_in_every_spelling(host):
    verdict = decide_name(rules(None, CLOUD_METADATA_DENY), host, 80)
    assert not verdict.allowed
    assert verdict.rule != "syntax"


@pytest.mark.threat(91)
@pytest.mark.parametrize(
    "host",
    [
        *METADATA,
        "kubernetes",
        "kubernetes.default",
        "kubernetes.default.svc",
        "kubernetes.default.svc.cluster.local",
        "other.namespace.svc.cluster.local.",
        "10.96.0.1",
        "10.244.1.7",
        "172.20.0.1",
        "192.168.49.2",
        "100.64.3.4",
        "fd00::1",
        "::ffff:10.96.0.1",
        "0x0a600001",
        "fe80::1",
    ],
)
def test_a_cluster_is_denied_on_an_open_network_in_every_spelling(host):
    assert not decide_name(rules(None, KUBERNETES_DENY), host, 443).allowed


@pytest.mark.parametrize("host", ["example.org", "192.0.2.1", "svc.example.org", "2001:db8::1"])
def test_the_rest_of_an_open_network_is_reached_beside_a_cluster(host):
    assert decide_name(rules(None, KUBERNETES_DENY), host, 443).allowed


@pytest.mark.parametrize("host", METADATA)
def test_metadata_is_refused_by_an_allow_list_without_it(host):
    assert not allowed(rules(PYPI_HOSTS), host, 80)


@pytest.mark.threat(91)
@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.9.9.9",
        "::1",
        "::",
        "0.0.0.0",
        "10.1.2.3",
        "172.31.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "168.63.129.16",
        "198.18.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "::ffff:10.0.0.1",
        "fe80::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::1",
        "2002:7f00:1::1",
        "2001:0:1::1",
        "fec0::1",
        "100::1",
        "::7f00:1",
    ],
)
def test_an_allowed_name_with_an_internal_address_needs_an_address_entry(address):
    verdict = decide_address(rules(["example.com"]), address, 443, name="example.com")
    assert not verdict.allowed
    assert verdict.rule == "internal"
    again = rules(["example.com", verdict.suggestion])
    assert decide_address(again, address, 443, name="example.com").allowed


@pytest.mark.parametrize(
    "address",
    [
        "93.184.215.14",
        "2606:2800:21f::1",
        "64:ff9b::5db8:d70e",
        "8.8.8.8",
        "192.0.2.1",
        "203.0.113.9",
        "2001:db8::1",
    ],
)
def test_an_allowed_name_on_the_internet_is_allowed(address):
    assert decide_address(rules(["example.com"]), address, 443, name="example.com").allowed


def test_an_address_entry_does_not_allow_an_unlisted_name():
    policy = rules(["93.184.215.0/24"])
    assert not decide_address(policy, "93.184.215.14", 443, name="example.com").allowed
    assert decide_address(policy, "93.184.215.14", 443, name=None).allowed


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1", "ff02::1"])
def test_loopback_is_refused_even_when_open(address):
    assert not decide_address(rules(None, ["10.0.0.0/8"]), address, 80, name=None).allowed
    assert not decide_address(rules(None), address, 80, name="example.com").allowed


def test_open_with_a_deny_list_reaches_private_addresses_that_are_not_denied():
    policy = rules(None, ["10.0.0.0/8"])
    assert decide_address(policy, "192.168.0.1", 80, name=None).allowed
    assert not decide_address(policy, "10.0.0.1", 80, name="example.com").allowed


def test_a_port_restricts_an_entry():
    policy = rules(["example.com:443", "192.0.2.1:22", "[2001:db8::1]:22", "*.a.example:8443"])
    assert allowed(policy, "example.com", 443)
    assert not allowed(policy, "example.com", 80)
    assert allowed(policy, "192.0.2.1", 22)
    assert not allowed(policy, "192.0.2.1", 23)
    assert allowed(policy, "[2001:db8::1]", 22)
    assert not allowed(policy, "2001:db8::1", 23)
    assert allowed(policy, "x.a.example", 8443)
    assert not allowed(policy, "x.a.example", 443)


def test_a_lookup_ignores_ports_and_a_denied_port_does_not_deny_it():
    assert decide_name(rules(["example.com:8443"]), "example.com", None).allowed
    assert decide_name(rules(None, ["example.com:25"]), "example.com", None).allowed
    assert not decide_name(rules(None, ["example.com:25"]), "example.com", 25).allowed
    assert not decide_name(rules(None, ["example.com"]), "example.com", None).allowed


def test_a_refusal_by_a_deny_entry_names_it_and_suggests_nothing():
    verdict = decide_name(rules(["a.example.com"], ["*.example.com"]), "a.example.com", 443)
    assert (verdict.allowed, verdict.rule, verdict.suggestion) == (False, "*.example.com", "")


@pytest.mark.threat(94)
def test_a_tls_server_name_must_be_the_host_or_another_allowed_name():
    policy = rules(["front.example", "other.example"], ["bad.example"])
    assert decide_server_name(policy, "front.example", 443, name="front.example").allowed
    assert decide_server_name(policy, "FRONT.example", 443, name="front.example").allowed
    assert decide_server_name(policy, "other.example", 443, name="front.example").allowed
    assert not decide_server_name(policy, "hidden.example", 443, name="front.example").allowed
    assert not decide_server_name(policy, "bad.example", 443, name="front.example").allowed
    assert not decide_server_name(policy, "a\0b", 443, name="front.example").allowed


def test_a_listed_address_accepts_any_server_name_that_is_not_denied():
    policy = rules(["192.0.2.1"], ["bad.example"])
    assert decide_server_name(policy, "any.example", 443, name=None).allowed
    assert not decide_server_name(policy, "bad.example", 443, name=None).allowed


LABEL = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=8)
NAME = st.lists(LABEL, min_size=1, max_size=4).map(".".join)
WILD_TEXT = st.text(
    st.one_of(
        st.sampled_from("examplcom.EXAMPLECOM-*@/:%[]0x1\0 \r\n\u3002\uff0e\uff45\u00df\u0131"),
        st.characters(),
    ),
    max_size=24,
)
HOSTS = st.one_of(
    WILD_TEXT,
    NAME,
    st.tuples(WILD_TEXT, st.sampled_from([".example.org", "example.com", "", "."])).map("".join),
)


def plainly(host: str) -> str:
    """Encode the whole name at once, as an independent reference."""
    text = unicodedata.normalize("NFKC", host).replace("\u3002", ".")
    return text.encode("idna").decode("ascii").lower().removesuffix(".")


@given(HOSTS)
def test_an_allowed_name_is_an_entry_or_matches_a_pattern(host):
    policy = rules(["example.com", "*.example.org", "xn--bcher-kva.example"])
    if allowed(policy, host):
        plain = plainly(host)
        assert plain in {"example.com", "xn--bcher-kva.example"} or (
            plain.endswith(".example.org") and plain != ".example.org"
        )


@given(HOSTS, st.integers(1, 65535))
def test_deny_overrides_allow(host, port):
    both = rules(["example.com", "*.example.com"], ["example.com", "*.example.com"])
    assert not decide_name(both, host, port).allowed


@given(NAME, st.integers(1, 65535))
def test_the_suggested_entry_allows_the_name(name, port):
    verdict = decide_name(rules([]), name, port)
    assert not verdict.allowed
    if verdict.suggestion:
        assert decide_name(rules([verdict.suggestion]), name, port).allowed


@given(st.ip_addresses(), st.integers(1, 65535))
def test_the_suggested_address_entry_allows_the_address(address, port):
    verdict = decide_address(rules([]), address, port, name=None)
    assert not verdict.allowed
    assert decide_address(rules([verdict.suggestion]), address, port, name=None).allowed


@pytest.mark.threat(88)
@given(st.ip_addresses(v=4))
def test_every_numeric_spelling_is_parsed_as_its_address(address):
    number = int(address)
    a, b, c, d = address.packed
    spellings = [
        str(number),
        hex(number),
        f"0{number:o}",
        f"{a}.{(b << 16) | (c << 8) | d}",
        f"{a}.{b}.{(c << 8) | d}",
        f"0x{a:x}.0{b:o}.{c}.{d}",
        f"::ffff:{address}",
        f"[::ffff:{address}]",
    ]
    assert {parse_host(text) for text in spellings} == {address}


# NAT64 addresses count as their inner address; documentation ranges are not internal.
NOT_GUARDED = [
    ipaddress.ip_network(network)
    for network in (
        "64:ff9b::/96",
        "192.0.2.0/24",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "2001:db8::/32",
        "3fff::/20",
    )
]


@given(st.ip_addresses())
def test_the_internal_guard_is_at_least_as_strict_as_the_standard_library(address):
    if decide_address(rules(["example.com"]), address, 443, name="example.com").allowed:
        plain = getattr(address, "ipv4_mapped", None) or address
        if not any(plain in network for network in NOT_GUARDED):
            assert plain.is_global
        assert not plain.is_multicast

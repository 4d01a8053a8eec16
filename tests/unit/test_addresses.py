from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest

from union.sandbox._policy.addresses import (
    canonical,
    embedded_ipv4,
    format_host_port,
    internal_range,
    parse_address,
    parse_inet_aton,
    unreachable_range,
)


@pytest.mark.threat(89)
def test_a_mapped_address_is_unwrapped():
    assert canonical(IPv6Address("::ffff:1.2.3.4")) == IPv4Address("1.2.3.4")
    assert parse_address("::ffff:102:304") == IPv4Address("1.2.3.4")


@pytest.mark.threat(89)
@pytest.mark.parametrize(
    "outer,inner",
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("64:ff9b::10.0.0.1", "10.0.0.1"),
        ("2002:a00:1::", "10.0.0.1"),
        ("2001:0:5db8:d70e::f5ff:fffe", "10.0.0.1"),
        ("::10.0.0.1", "10.0.0.1"),
    ],
)
def test_embedded_ipv4_addresses_are_found(outer, inner):
    assert embedded_ipv4(IPv6Address(outer)) == IPv4Address(inner)


@pytest.mark.parametrize("plain", ["::1", "::", "2606:2800::1", "fe80::1"])
def test_ordinary_addresses_embed_no_ipv4_address(plain):
    assert embedded_ipv4(IPv6Address(plain)) is None


def test_nat64_is_classified_by_its_inner_address():
    assert not internal_range(IPv6Address("64:ff9b::8.8.8.8"))
    assert "private" in internal_range(IPv6Address("64:ff9b::10.0.0.1"))
    assert unreachable_range(IPv6Address("64:ff9b::127.0.0.1"))


@pytest.mark.parametrize("text", ["1.2.3.4.5", "256.1", "1.2.65536", "09", "0xg", "", "1..2", "-1"])
def test_invalid_ipv4_spellings(text):
    assert parse_inet_aton(text) is None


def test_a_huge_number_is_refused_without_conversion():
    assert parse_inet_aton("9" * 100_000) is None


def test_format_host_port():
    assert format_host_port("::1", 80) == "[::1]:80"
    assert format_host_port("a.example", 80) == "a.example:80"
    assert format_host_port("a.example", None) == "a.example"


@pytest.mark.parametrize("text", ["fe80::1%1", "1.2.3", "01.2.3.4", "a.example", "\uff11.2.3.4"])
def test_parse_address_accepts_standard_notation_only(text):
    assert parse_address(text) is None

"""Entries are validated, and errors name the invalid entry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from union.sandbox._policy.entries import first_uncovered, parse_entries
from union.sandbox.constants import CLOUD_METADATA_DENY, PYPI_HOSTS
from union.sandbox.errors import PolicyError


def texts(*entries, argument="network_allowlist"):
    return [entry.text for entry in parse_entries(list(entries), argument=argument)]


@pytest.mark.parametrize(
    "given_text,canonical",
    [
        ("Example.COM.", "example.com"),
        ("example.com:443", "example.com:443"),
        ("*.Example.com", "*.example.com"),
        ("b\u00fccher.example", "xn--bcher-kva.example"),
        ("\uff45xample\u3002com", "example.com"),
        ("_srv.example.com", "_srv.example.com"),
        ("localhost", "localhost"),
        ("192.0.2.1", "192.0.2.1"),
        ("192.0.2.0/24", "192.0.2.0/24"),
        ("192.0.2.0/24:22", "192.0.2.0/24:22"),
        ("192.0.2.1/32", "192.0.2.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("[2001:db8::1]:443", "[2001:db8::1]:443"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("[2001:db8::/32]:443", "[2001:db8::/32]:443"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.0/120", "192.0.2.0/24"),
    ],
)
def test_entries_are_normalised(given_text, canonical):
    assert texts(given_text) == [canonical]
    assert texts(canonical) == [canonical]


@pytest.mark.parametrize(
    "entry,says",
    [
        ("https://example.com/x", "URL"),
        ("http://user@example.com", "URL"),
        ("*", "every host"),
        ("*.", "every host"),
        ("*:443", "every host"),
        ("*.com", "top-level"),
        ("a*.example.com", "wildcard"),
        ("a.*.com", "wildcard"),
        ("*.*.example.com", "wildcard"),
        ("**.example.com", "wildcard"),
        ("*example.com", "wildcard"),
        ("*.192.0.2", "CIDR"),
        ("10.0.0.1/8", "10.0.0.0/8"),
        ("2001:db8::1/32", "2001:db8::/32"),
        ("10.0.0.0/33", "prefix length"),
        ("10.0.0.0/", "prefix length"),
        ("10.0.0.0/255.0.0.0", "prefix length"),
        ("10.0.0/8", "IPv4"),
        ("0.0.0.0/0", "every address"),
        ("::/0", "every address"),
        ("::ffff:0:0/96", "every address"),
        ("example.com/24", "path"),
        ("example.com:0", "1 to 65535"),
        ("example.com:65536", "1 to 65535"),
        ("example.com:", "not a number"),
        ("example.com:https", "not a number"),
        ("example.com:0443", "not a number"),
        ("example.com:+80", "not a number"),
        ("example.com:\uff14\uff14\uff13", "not a number"),
        (":443", "no host"),
        ("user@example.com", "user information"),
        ("", "empty"),
        (" example.com", "space"),
        ("example.com\n", "control"),
        ("example.com\0", "control"),
        ("exam\u200bple.com", "control"),
        ("fa\u00df.example", "IDNA"),
        ("a..b", "empty label"),
        ("-a.example", "label"),
        ("a" * 64 + ".example", "label"),
        ("a.example,b.example", "character"),
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("1.2.3.4.5", "not an IPv4"),
        ("1.2.3.400", "not an IPv4"),
        ("fe80::1%eth0", "zones"),
        ("2001:db8::zz", "IPv6"),
        ("[2001:db8::1", "brackets"),
        ("[2001:db8::1]443", "brackets"),
        ("[example.com]:443", "brackets"),
    ],
)
def test_an_invalid_entry_is_named_with_a_remedy(entry, says):
    with pytest.raises(PolicyError) as info:
        parse_entries(["ok.example", entry], argument="network_allowlist")
    assert info.value.argument == "network_allowlist"
    assert "network_allowlist[1]" in str(info.value)
    assert ascii(entry)[:20] in str(info.value)
    assert says in str(info.value)
    assert info.value.hint


@pytest.mark.parametrize(
    "value", ["example.com", b"example.com", None, 5, {"example.com": 1}, [5], [None], [b"a"]]
)
def test_only_lists_of_strings_are_accepted(value):
    with pytest.raises(PolicyError) as info:
        parse_entries(value, argument="network_denylist")
    assert info.value.argument == "network_denylist"


def test_a_deny_list_accepts_a_top_level_domain_or_address_family():
    assert texts("*.internal", "::/0", argument="network_denylist") == ["*.internal", "::/0"]


def test_duplicates_are_dropped_and_order_is_kept():
    assert texts("b.example", "a.example", "B.example.") == ["b.example", "a.example"]


def test_sets_are_read_in_a_stable_order():
    entries = parse_entries({"b.example", "a.example"}, argument="network_allowlist")
    assert [entry.text for entry in entries] == ["a.example", "b.example"]


def test_the_public_host_lists_are_valid():
    assert len(texts(*PYPI_HOSTS)) == len(PYPI_HOSTS)
    assert len(texts(*CLOUD_METADATA_DENY, argument="network_denylist")) == len(CLOUD_METADATA_DENY)


@given(st.text(max_size=30))
def test_any_text_is_an_entry_or_a_policy_error_and_canonical_text_is_stable(text):
    try:
        (entry,) = parse_entries([text], argument="network_allowlist")
    except PolicyError:
        return
    assert parse_entries([entry.text], argument="network_allowlist") == (entry,)


@pytest.mark.parametrize(
    "narrow,wide,fits",
    [
        ("a.example", "a.example", True),
        ("a.example:443", "a.example", True),
        ("a.example", "a.example:443", False),
        ("a.example:80", "a.example:443", False),
        ("x.a.example", "*.a.example", True),
        ("a.example", "*.a.example", False),
        ("xa.example", "*.a.example", False),
        ("*.a.example", "*.a.example", True),
        ("*.x.a.example", "*.a.example", True),
        ("*.a.example", "a.example", False),
        ("*.a.example", "*.x.a.example", False),
        ("10.1.0.0/16", "10.0.0.0/8", True),
        ("10.0.0.0/8", "10.1.0.0/16", False),
        ("10.0.0.1", "10.0.0.0/8", True),
        ("2001:db8::1", "10.0.0.0/8", False),
        ("2001:db8::1", "2001:db8::/32", True),
        ("10.0.0.1", "*.a.example", False),
        ("a.example", "10.0.0.0/8", False),
    ],
)
def test_coverage_of_one_entry_by_another(narrow, wide, fits):
    entries = parse_entries([narrow], argument="network_allowlist")
    ceiling = parse_entries(["other.example", wide], argument="network_allowlist")
    assert (first_uncovered(entries, ceiling=ceiling) is None) is fits


def test_the_first_uncovered_entry_is_returned():
    ceiling = parse_entries(["a.example"], argument="network_allowlist")
    entries = parse_entries(["a.example", "b.example"], argument="network_allowlist")
    assert first_uncovered(entries, ceiling=ceiling).text == "b.example"
    assert first_uncovered((), ceiling=()) is None
    assert first_uncovered(entries, ceiling=()).text == "a.example"

from __future__ import annotations

from ipaddress import ip_address, ip_network

from union.sandbox._policy import synthetic
from union.sandbox._policy.synthetic import SyntheticNames


def test_a_name_keeps_its_addresses_and_they_map_back():
    names = SyntheticNames()
    four, six = names.addresses("a.example")
    assert names.addresses("a.example") == (four, six)
    assert names.addresses("b.example") != (four, six)
    assert names.name(four) == names.name(six) == "a.example"
    assert four in ip_network("198.18.0.0/15")
    assert six.is_private


def test_unassigned_addresses_map_to_no_name():
    names = SyntheticNames()
    names.addresses("a.example")
    for text in ("198.18.0.0", "198.18.0.2", "198.17.255.255", "8.8.8.8", "::1"):
        assert names.name(ip_address(text)) is None


def test_the_number_of_names_is_limited(monkeypatch):
    monkeypatch.setattr(synthetic, "MAX_NAMES", 2)
    names = SyntheticNames()
    assert names.addresses("a.example")
    assert names.addresses("b.example")
    assert names.addresses("c.example") is None
    assert names.addresses("a.example")


def test_the_last_name_is_inside_the_range():
    last = int(ip_address("198.18.0.0")) + synthetic.MAX_NAMES
    assert ip_address(last) in ip_network("198.18.0.0/15")

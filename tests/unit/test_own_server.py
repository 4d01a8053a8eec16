"""Connections to the server that runs a sandbox are refused."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from union.sandbox._net.own_server import OwnServer, is_local


def refused(server: OwnServer, host: str, port: int = 80) -> bool:
    return bool(server.refusal(ip_address(host), port))


@pytest.mark.threat(162)
@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "::ffff:0.0.0.0"])
def test_a_server_on_all_addresses_is_refused_at_every_local_address(bound):
    local = {"198.51.100.7", "2001:db8:7::9"}
    server = OwnServer([(bound, 80)], is_local=lambda address: str(address) in local)
    for host in ("198.51.100.7", "2001:db8:7::9", "127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::",
                 "::ffff:127.0.0.1", "::ffff:198.51.100.7", "64:ff9b::198.51.100.7"):  # fmt: skip
        assert refused(server, host), host
        assert not refused(server, host, 81), "another port belongs to another service"
    assert not refused(server, "203.0.113.5")
    # The host gains an address.
    local.add("203.0.113.5")
    assert refused(server, "203.0.113.5")


def test_a_server_on_one_address_does_not_refuse_others():
    server = OwnServer([("192.0.2.7", 80), ("127.0.0.1", 81)], is_local=lambda _: True)
    assert refused(server, "192.0.2.7")
    assert refused(server, "0.0.0.0")
    assert not refused(server, "192.0.2.8")
    assert refused(server, "127.0.0.2", 81)
    assert not refused(server, "192.0.2.8", 81)
    assert not OwnServer([]).listens_on_tcp


@pytest.mark.threat(162)
def test_a_failed_route_query_is_a_refusal():
    def fails(_address: object) -> bool:
        raise OSError("no netlink here")

    server = OwnServer([("0.0.0.0", 80)], is_local=fails)
    assert refused(server, "203.0.113.5")
    assert not refused(server, "203.0.113.5", 443)


def test_the_kernel_reports_local_addresses():
    for host, wanted in (("127.0.0.1", True), ("127.200.1.2", True), ("192.0.2.200", False)):
        assert is_local(ip_address(host)) is wanted

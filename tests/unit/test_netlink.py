"""The encoding of the messages; tests/net/test_namespace.py sends them to the kernel."""

from __future__ import annotations

import struct

import pytest

from union.sandbox._codecs.netlink import (
    NETLINK_NETFILTER,
    NETLINK_ROUTE,
    egress_setup,
    loopback_setup,
)

ACK = 0x004
BATCH = {0x10, 0x11}


def messages(data):
    while data:
        length, kind, flags, sequence, port = struct.unpack_from("=IHHII", data)
        assert 16 <= length <= len(data)
        yield kind, flags, sequence, port, data[16:length]
        data = data[(length + 3) & ~3 :]


def attributes(data):
    while data:
        length, kind = struct.unpack_from("=HH", data)
        assert 4 <= length <= len(data)
        yield kind & 0x7FFF, data[4:length]
        data = data[(length + 3) & ~3 :]


@pytest.mark.parametrize("options", [{}, {"ipv6": False}, {"redirect": False}])
def test_every_message_is_complete_and_acknowledgements_are_counted(options):
    for step in egress_setup(3128, **options):
        found = list(messages(step.data))
        assert sum(1 for _kind, flags, *_ in found if flags & ACK) == step.acks
        assert all(port == 0 for *_, port, _body in found)
        assert step.description


def test_a_netfilter_step_is_one_transaction():
    for step in egress_setup(3128):
        if step.protocol == NETLINK_NETFILTER:
            kinds = [kind for kind, *_ in messages(step.data)]
            assert (kinds[0], kinds[-1]) == (0x10, 0x11)
            assert not BATCH & set(kinds[1:-1])


def test_the_redirect_rule_precedes_the_local_route():
    what = [step.description for step in egress_setup(3128)]
    assert what[0] == "loopback up"
    for family in ("IPv4", "IPv6"):
        rule = next(i for i, text in enumerate(what) if text.startswith(f"{family} redirect"))
        route = next(i for i, text in enumerate(what) if text.startswith(f"{family} local route"))
        assert rule < route


def test_without_redirect_only_loopback_comes_up():
    assert egress_setup(3128, redirect=False) == loopback_setup()
    assert [step.protocol for step in loopback_setup()] == [NETLINK_ROUTE]


def test_the_port_changes_only_the_redirect_rule():
    one, two = egress_setup(0x1234), egress_setup(0x4321)
    for first, second in zip(one, two, strict=True):
        assert len(first.data) == len(second.data)
        if first.protocol == NETLINK_ROUTE:
            assert first == second
        else:
            assert first.data.replace(b"\x12\x34", b"\x43\x21") == second.data


def test_expressions_of_the_rule_in_order():
    step = egress_setup(3128)[1]
    rule = next(body for kind, _, _, _, body in messages(step.data) if kind == (10 << 8) | 6)
    expressions = dict(attributes(rule[4:]))[4]
    names = [dict(attributes(item))[1] for _, item in attributes(expressions)]
    assert names == [
        b"meta\0",
        b"cmp\0",
        b"payload\0",
        b"bitwise\0",
        b"cmp\0",
        b"immediate\0",
        b"redir\0",
    ]


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports_out_of_range_are_refused(port):
    with pytest.raises(ValueError, match="transparent_port"):
        egress_setup(port)

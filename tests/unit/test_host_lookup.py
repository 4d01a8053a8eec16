"""A name with a dot is looked up as it is before any search domain."""

from __future__ import annotations

import socket

import pytest

from union.sandbox._net import host_lookup

FOUND = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Record every look-up; names that end in ``missing.`` do not exist."""
    names: list[str] = []

    def getaddrinfo(name, *_, **__):
        names.append(name)
        if name.endswith("missing."):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if name.endswith("broken."):
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return FOUND

    monkeypatch.setattr(host_lookup.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(host_lookup, "_RESOLV_CONF", tmp_path / "resolv.conf")
    monkeypatch.setattr(host_lookup, "_HOSTS", tmp_path / "hosts")
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n192.0.2.9 Own.Example # ours\n")
    (tmp_path / "resolv.conf").write_text(
        "search default.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\n"
        "options timeout:1 ndots:5\n"
    )
    return names


@pytest.mark.spec("F5")
@pytest.mark.parametrize(
    "name, expected",
    [
        ("files.example.org", ["files.example.org."]),
        ("service.namespace.missing", ["service.namespace.missing.", "service.namespace.missing"]),
        ("service", ["service"]),
        ("a.b.c.d.e.f", ["a.b.c.d.e.f"]),
        ("already.absolute.", ["already.absolute."]),
        ("own.example", ["own.example"]),
    ],
    ids=["public", "relative", "one label", "many dots", "absolute", "hosts file"],
)
def test_the_absolute_name_comes_first(asked, name, expected):
    assert host_lookup.look_up(name) == FOUND
    assert asked == expected


def test_a_name_whose_look_up_fails_is_not_replaced_by_another(asked):
    with pytest.raises(socket.gaierror, match="Temporary failure"):
        host_lookup.look_up("www.broken")
    assert asked == ["www.broken."]


@pytest.mark.parametrize("text", [None, "options ndots:1\n", "options ndots:x\n", "\n#options\n"])
def test_the_usual_configuration_needs_no_second_form(asked, tmp_path, text):
    (tmp_path / "resolv.conf").unlink()
    if text is not None:
        (tmp_path / "resolv.conf").write_text(text)
    assert host_lookup.look_up("files.example.org") == FOUND
    assert asked == ["files.example.org"]

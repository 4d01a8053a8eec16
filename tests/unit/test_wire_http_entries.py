"""Http entries and secrets on the wire, and secrets that a server owns."""

from __future__ import annotations

import copy
import os
import socket
import stat

import pytest

from union import sandbox as sb
from union.sandbox._policy.entries import parse_entries
from union.sandbox._policy.stored_secrets import parse_stored, resolve_stored
from union.sandbox._wire.endpoint import parse_endpoint
from union.sandbox._wire.frames import WireError
from union.sandbox._wire.http_values import decode_entry, decode_secret, encode_entry
from union.sandbox._wire.launch import LaunchSpec
from union.sandbox.remote._http_entries import SentEntries
from union.sandbox.server._auth import Grant
from union.sandbox.server._config import config_from_arguments
from union.sandbox.server._http import is_private
from union.sandbox.server._http_entries import SessionEntries

pytestmark = pytest.mark.spec("M4")

VALUE = "sk-proj-Tr0ub4dor3staple0123456789abcdef"
KEY = sb.Secret(VALUE)
AUTHS = {
    "none": None,
    "bearer": sb.Bearer(KEY),
    "header": sb.Header("x-api-key", KEY, prefix="token "),
    "basic": sb.Basic("me", KEY),
    "query": sb.Query("key", KEY),
    "sigv4": sb.SigV4("AKIA", KEY, session_token=KEY),
    "server": sb.ServerSecret("openai"),
}
OPTIONS = {
    "allow": ["GET /v1/**"], "max_requests": 3, "max_bytes_up": 4, "max_bytes_down": 5,
    "scrub": False, "websockets": True,
}  # fmt: skip


@pytest.mark.parametrize("kind", AUTHS)
def test_an_entry_is_the_same_after_the_wire_and_has_no_value(kind):
    entry = sb.Http("api.test:8443", auth=AUTHS[kind], **OPTIONS)
    payload = encode_entry(entry, "a" * 32, lambda _: "b" * 32)
    assert VALUE not in str(payload)
    found = decode_entry(payload, {"b" * 32: KEY}.__getitem__)
    for name in ("host", "port", "auth", "env", *OPTIONS):
        assert getattr(found, name) == getattr(entry, name), name


GOOD = {"id": "a" * 32, "host": "api.test", "auth": {"kind": "bearer", "secret": "b" * 32}}
MALFORMED = [
    {**GOOD, "id": "short"},
    {**GOOD, "id": None},
    {**GOOD, "more": 1},
    {**GOOD, "host": 7},
    {**GOOD, "host": "x" * 301},
    {**GOOD, "allow": "GET /"},
    {**GOOD, "allow": ["GET /"] * 1025},
    {**GOOD, "max_requests": -1},
    {**GOOD, "max_requests": True},
    {**GOOD, "max_requests": 2**64},
    {**GOOD, "auth": "bearer"},
    {**GOOD, "auth": {}},
    {**GOOD, "auth": {"kind": "cookie"}},
    {**GOOD, "auth": {"kind": "bearer"}},
    {**GOOD, "auth": {"kind": "bearer", "secret": "x"}},
    {**GOOD, "auth": {"kind": "bearer", "secret": "b" * 32, "name": "x"}},
    {**GOOD, "auth": {"kind": "header", "name": 7, "secret": "b" * 32}},
]


@pytest.mark.parametrize("payload", MALFORMED)
def test_a_malformed_entry_is_refused(payload):
    with pytest.raises(WireError):
        decode_entry(payload, {"b" * 32: KEY}.__getitem__)
    assert decode_entry(GOOD, {"b" * 32: KEY}.__getitem__).auth == sb.Bearer(KEY)


@pytest.mark.parametrize(
    "payload",
    [None, {}, {"value": VALUE}, {"value": VALUE, "placeholder": 7},
     {"value": VALUE, "placeholder": "short"}, {"value": VALUE + "\n", "placeholder": VALUE},
     {"value": VALUE, "placeholder": "\ud800" * len(VALUE)},
     {"value": "x" * 20_000, "placeholder": "y" * 20_000}],
)  # fmt: skip
def test_a_malformed_secret_is_refused_without_its_value(payload):
    with pytest.raises((WireError, sb.PolicyError)) as caught:
        decode_secret(payload)
    assert VALUE not in str(caught.value)


def listed(*entries):
    return parse_entries(list(entries), argument="network_allowlist")


def test_a_value_is_sent_until_it_is_confirmed():
    sent = SentEntries(parse_endpoint("https://server.test"))
    allow = listed(sb.Http("a.test", auth=sb.Bearer(KEY)), "b.test")
    first, again = sent.encode(allow), sent.encode(allow)
    assert first == again
    assert [item["value"] for item in first["secrets"].values()] == [VALUE]
    sent.confirm(allow)
    assert "secrets" not in sent.encode(allow)
    assert sent.encode(listed(sb.Http("c.test", auth=sb.Query("k", KEY)))).keys() == {
        "network_allowlist"
    }, "another entry with the same secret sends no value"
    sent.forget()
    assert "secrets" in sent.encode(allow)


@pytest.mark.threat(192)
@pytest.mark.parametrize(
    "endpoint, is_sent",
    [("http://192.0.2.1:80", False), ("http://server.test", False),
     ("http://[2001:db8::1]:80", False), ("http://127.0.0.1.example:80", False),
     ("https://server.test", True),
     ("unix:///run/s", True), ("http://127.0.0.1:80", True), ("http://[::1]:80", True)],
)  # fmt: skip
def test_a_value_is_sent_by_private_ways_alone(endpoint, is_sent):
    sent = SentEntries(parse_endpoint(endpoint))
    named = listed(sb.Http("a.test", auth=sb.ServerSecret("openai")), sb.Http("b.test"))
    assert "secrets" not in sent.encode(named), "a name may be sent by every way"
    allow = listed(sb.Http("a.test", auth=sb.Bearer(KEY)))
    if is_sent:
        assert VALUE in str(sent.encode(allow))
        return
    with pytest.raises(sb.PolicyError) as caught:
        sent.encode(allow)
    assert caught.value.code == "unencrypted"
    assert "https" in caught.value.hint


class _Request:
    """A request over a connection of some kind."""

    def __init__(self, **known):
        self.transport = self
        self._known = known

    def get_extra_info(self, name):
        return self._known.get(name)


@pytest.mark.threat(192)
def test_a_server_accepts_values_over_private_connections_alone():
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
        assert is_private(_Request(sslcontext=object(), socket=tcp, peername=("192.0.2.1", 1)))
        assert is_private(_Request(socket=unix, peername=""))
        assert is_private(_Request(socket=tcp, peername=("127.0.0.1", 1)))
        for peer in (("192.0.2.1", 1), ("10.0.0.1", 1), ("fe80::1%eth0", 1, 0, 2), None, ()):
            assert not is_private(_Request(socket=tcp, peername=peer))
    fields = {
        "network_allowlist": [GOOD],
        "secrets": {"b" * 32: {"value": VALUE, "placeholder": KEY.placeholder}},
    }
    entries = SessionEntries({})
    with pytest.raises(sb.PolicyError) as caught:
        entries.resolve(fields, Grant(), is_private=False)
    assert caught.value.code == "unencrypted"
    (found,) = entries.resolve(fields, Grant(), is_private=True)["network_allowlist"]
    assert found.auth.secret.reveal() == VALUE


@pytest.mark.threat(191)
def test_secrets_of_one_token_are_unknown_to_another():
    entries = SessionEntries({})
    secrets = {"b" * 32: {"value": VALUE, "placeholder": KEY.placeholder}}
    fields = {"network_allowlist": [GOOD], "secrets": secrets}
    entries.resolve(fields, Grant(), is_private=True)
    named = {"network_allowlist": [GOOD]}
    assert entries.resolve(named, Grant(), is_private=False)["network_allowlist"]
    for grant in (Grant("s", "guest"), Grant("s", "capability:1")):
        with pytest.raises(sb.PolicyError) as caught:
            entries.resolve(named, grant, is_private=True)
        assert caught.value.code == "secret-dropped"


STORED = {"host": "api.test", "value": VALUE}


@pytest.mark.parametrize(
    "change",
    [{"host": None}, {"host": "https://x"}, {"value": None}, {"value": VALUE + "\n"},
     {"auth": "cookie"}, {"auth": "header"}, {"name": "x"}, {"roles": []}, {"roles": ["metrics"]},
     {"roles": "owner"}, {"scrub": False}, {"allow": ["TRACE /"]}, {"max_requests": "3"}],
)  # fmt: skip
def test_an_invalid_stored_secret_is_refused_without_its_value(change):
    with pytest.raises(sb.PolicyError) as caught:
        parse_stored({"openai": {**STORED, **change}}, argument="--secrets")
    assert VALUE not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
    assert "openai" in str(caught.value)


def test_a_narrower_entry_keeps_the_operators_credential_and_budget():
    stored = parse_stored({"a": {**STORED, "max_requests": 5}}, argument="--secrets")
    entry = sb.Http("api.test", auth=sb.ServerSecret("a"), max_requests=9, env="KEY")
    found = resolve_stored(entry, stored, "owner")
    assert found.auth is stored["a"].http.auth
    assert (found.max_requests, found.within) == (5, stored["a"].http)
    assert found.variables == (("KEY", found.auth.secret.placeholder),)
    assert found.callers_secret is None
    assert VALUE not in repr(stored)


@pytest.mark.threat(167)
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o644, 0o666, 0o620])
@pytest.mark.parametrize("is_named", [False, True])
def test_the_mode_of_a_file_with_secrets(tmp_path, mode, is_named):
    for directory in (tmp_path, *tmp_path.parents):
        if directory.stat().st_uid == os.geteuid():
            directory.chmod(stat.S_IMODE(directory.stat().st_mode) | stat.S_IXOTH)
    value, file = tmp_path / "value", tmp_path / "secrets.toml"
    value.write_text(VALUE + "\n")
    place = f"value_file = '{value}'" if is_named else f"value = '{VALUE}'"
    file.write_text(f"[openai]\nhost = 'api.test'\n{place}\n")
    file.chmod(0o600)
    value.chmod(0o600)
    (value if is_named else file).chmod(mode)
    if mode & 0o022 or mode & 0o004:
        with pytest.raises(sb.SandboxUsageError) as caught:
            config_from_arguments(["--secrets", str(file)], {})
        assert VALUE not in str(caught.value)
        assert caught.value.hint
        return
    config = config_from_arguments(["--secrets", str(file)], {})
    assert config.secrets["openai"].http.auth.secret.reveal() == VALUE
    assert VALUE not in repr(config)


def test_a_file_that_is_not_toml_is_not_quoted(tmp_path):
    file = tmp_path / "secrets.toml"
    file.write_text(f"[openai]\nvalue = {VALUE}\n")
    file.chmod(0o600)
    with pytest.raises(sb.SandboxUsageError, match="TOML") as caught:
        config_from_arguments(["--secrets", str(file)], {})
    assert VALUE not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_a_launch_document_shows_no_value():
    spec = LaunchSpec(
        session="s", session_arguments={}, owner_sha256="", guest_sha256="", expires=1.0,
        secrets={"a": {**STORED}},
    )  # fmt: skip
    assert VALUE not in repr(spec)
    assert LaunchSpec.decode(spec.encode()) == spec
    assert copy.copy(spec).secrets == {"a": STORED}

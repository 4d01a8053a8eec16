from __future__ import annotations

import pytest

from union.sandbox._policy.upstream import Upstream, parse_upstream
from union.sandbox.errors import PolicyError


@pytest.mark.parametrize(
    "url,expected",
    [
        ("http://proxy.example:3128", Upstream(kind="http", host="proxy.example", port=3128)),
        ("http://proxy.example/", Upstream(kind="http", host="proxy.example", port=8080)),
        ("socks5://[::1]:1081", Upstream(kind="socks5", host="::1", port=1081)),
        ("socks5h://10.0.0.1", Upstream(kind="socks5", host="10.0.0.1", port=1080)),
        (
            "http://me:s%40cret@proxy.example:1",
            Upstream(kind="http", host="proxy.example", port=1, username=b"me", password=b"s@cret"),
        ),
    ],
)
def test_valid_urls_are_parsed(url, expected):
    assert parse_upstream(url, argument="network_proxy_url") == expected


@pytest.mark.parametrize(
    "url",
    ["", "proxy.example:3128", "https://proxy.example", "ftp://x", "http://", "http://a:b:c",
     "http://a:99999", "http://a/path", "http://a?x", "http://a\r\nX: y", "http://a b",
     "socks5://" + "u" * 256 + "@a"],
)  # fmt: skip
def test_errors_do_not_repeat_the_url(url):
    with pytest.raises(PolicyError) as info:
        parse_upstream(url, argument="network_proxy_url")
    assert info.value.argument == "network_proxy_url"
    assert info.value.hint


def test_the_password_is_not_in_the_repr():
    assert "hidden" not in repr(parse_upstream("http://u:hidden@a", argument="network_proxy_url"))

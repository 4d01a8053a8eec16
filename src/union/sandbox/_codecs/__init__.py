"""Parsers and builders for HTTP/1, DNS, the TLS greeting and netlink. No input or output."""

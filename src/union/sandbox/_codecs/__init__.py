"""Parsers and encoders for HTTP/1, DNS, the TLS ClientHello and netlink. No input or output."""

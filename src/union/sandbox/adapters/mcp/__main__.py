"""``python -m union.sandbox.adapters.mcp``: the process that ``sandbox-server --mcp`` starts."""

from __future__ import annotations

import argparse
import sys

from union.sandbox.errors import SandboxError


def main() -> int:
    """Serve MCP for the clients of a server; return 2 if that is impossible."""
    parser = argparse.ArgumentParser(prog="sandbox-server --mcp", allow_abbrev=False)
    for name in ("--endpoint", "--host"):
        parser.add_argument(name, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--allow", action="append", default=[])
    parser.add_argument("--tls-cert")
    parser.add_argument("--tls-key")
    options = parser.parse_args()
    try:
        from union.sandbox.adapters import mcp

        network = {"network_mode": "allowlist", "network_allowlist": options.allow}
        mcp.serve_gateway(
            **(network if options.allow else {}),
            endpoint=options.endpoint,
            host=options.host,
            port=options.port,
            tls_cert=options.tls_cert,
            tls_key=options.tls_key,
            is_child=True,
        )
    except (SandboxError, ImportError) as exc:
        sys.stderr.write(f"sandbox-server: --mcp: {exc}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

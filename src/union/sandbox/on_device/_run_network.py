"""Serve the filtered network of one command, in the way that its backend offers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from union.sandbox.on_device._mediated_network import serve_mediated

if TYPE_CHECKING:
    from union.sandbox._core.spec import RunSpec
    from union.sandbox._linux.run import LocalRun
    from union.sandbox._session.transport import Sink
    from union.sandbox.on_device._network import SessionNetwork
    from union.sandbox.on_device._pool import Pool

__all__ = ["serve_network"]


def serve_network(
    run: LocalRun, spec: RunSpec, sink: Sink, *, network: SessionNetwork, pool: Pool
) -> None:
    """Serve the connections of a command until it ends.

    Args:
        run: the command.
        spec: its arguments, with its network.
        sink: receives decisions and requests.
        network: the network state of the session.
        pool: the sandboxes of the session.

    """
    sandbox = run.sandbox
    if pool.backend == "landlock":
        open_egress = functools.partial(network.open_mediated, spec.network, sink)
        serve_mediated(run, open_egress)
    elif not pool.is_bare:

        def on_listeners(fds: list[int]) -> None:
            run.close_listeners = network.open(spec.network, fds, sink).aclose

        run.on_listeners = on_listeners
    elif sandbox.listeners:
        proxies = network.open_proxies(spec.network, sandbox.listeners, sandbox.credentials, sink)
        run.close_listeners = proxies.aclose

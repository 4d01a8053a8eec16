"""The host's side of a sandbox's network: the frontends and the dialer behind them."""

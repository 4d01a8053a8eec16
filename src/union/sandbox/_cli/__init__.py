"""``sbx``: the session API on the command line."""

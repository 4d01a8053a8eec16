"""The host's side of a sandbox's network: the doors, and the one who dials."""

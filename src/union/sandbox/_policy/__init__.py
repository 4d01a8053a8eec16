"""Network policy: entries, names, addresses and decisions. No input or output."""

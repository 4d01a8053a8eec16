"""Contexts: interpreters that stay alive and run cells, with values that any transport carries."""

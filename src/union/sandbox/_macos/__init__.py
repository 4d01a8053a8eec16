"""The engine for systems without Linux's calls, and what only macOS has."""

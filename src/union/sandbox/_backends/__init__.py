"""One isolation mechanism per module; a requested backend is used or refused with the reason."""

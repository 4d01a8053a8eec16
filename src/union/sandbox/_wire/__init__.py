"""The wire between client and server: frames, values, errors and the run log."""

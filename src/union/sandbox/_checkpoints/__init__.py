"""Checkpoints: states of a work dir that a session returns to, forks from and compares with."""

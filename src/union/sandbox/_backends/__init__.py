"""One mechanism of isolation per module; what is asked for is used, or refused with the reason."""

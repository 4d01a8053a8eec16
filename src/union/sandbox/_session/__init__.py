"""What a caller holds: the session, the process, the streams; one code for all transports."""

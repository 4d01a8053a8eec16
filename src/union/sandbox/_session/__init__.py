"""What a caller holds: the session, the process handle, the streams; the same for every transport."""

"""Session, SandboxProcess and streams: the same code for all transports."""

"""The fence: every descriptor, signal, raw system call and spawned process of this package."""

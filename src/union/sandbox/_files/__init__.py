"""Work on single files by descriptors, on any POSIX system."""

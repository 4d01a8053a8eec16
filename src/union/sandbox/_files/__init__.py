"""Work on single files by descriptors, with what every POSIX system has."""

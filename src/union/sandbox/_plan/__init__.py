"""The plan of a sandbox: steps, root file system, bwrap arguments. No input or output."""

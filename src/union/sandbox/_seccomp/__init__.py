"""The system-call filter: policy, BPF assembler and system-call numbers. No input or output."""

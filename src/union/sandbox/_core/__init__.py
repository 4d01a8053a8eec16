"""Values and pure functions: specs, events, reports, argument checks. No input or output."""

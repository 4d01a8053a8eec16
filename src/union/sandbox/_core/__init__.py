"""Decisions without side effects: values in, values out; no operating system in here."""

"""Decides everything about a job before a process starts."""

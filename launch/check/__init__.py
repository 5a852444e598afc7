"""Finds what would stop a job before it starts: `--check`."""

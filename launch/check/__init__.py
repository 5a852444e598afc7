"""Looks for what will be in a job's way: `--check`."""

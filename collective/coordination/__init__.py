"""Keeps ranks together: they agree on every run, and end, leave, fail and meet together."""

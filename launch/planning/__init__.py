"""Decides everything about a job before any process starts."""

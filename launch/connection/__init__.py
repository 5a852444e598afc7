"""Connects the launchers of several hosts."""

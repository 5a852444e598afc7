"""Starts the processes of a host's ranks, and ends them all."""

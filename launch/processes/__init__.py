"""Starts the processes of a host's ranks, and ends all of them."""

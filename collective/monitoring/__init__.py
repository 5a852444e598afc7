"""Watches training runs: the observer, the consistency check of replicas, the check of input."""

"""Watches training runs: the observer of runs, and the consistency check of replicas."""

"""Watches training runs: observers of runs, and the consistency check of replicas."""

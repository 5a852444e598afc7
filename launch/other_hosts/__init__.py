"""Starts and follows the launchers of a job's other hosts."""

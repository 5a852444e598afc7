"""Watches how far ranks have come, and finds the one that keeps a job waiting."""

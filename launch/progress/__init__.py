"""Watches the ranks' progress, and finds the rank that keeps a job waiting."""

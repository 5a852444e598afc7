"""Provides collectives, exchanges and kernels: the parts of a backend.

Nothing here knows about strategies, scopes or tables.
"""

"""Provides collectives, exchanges and kernels: the parts of a backend.

Nothing here knows strategies, scopes or tables.
"""

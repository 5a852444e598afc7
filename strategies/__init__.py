"""The backends: ways to carry out a group of lookups on sharded tables."""

from collective.strategies.base import Backend, Lookup, backend

__all__ = ["Backend", "Lookup", "backend"]

"""Executes groups of lookups on sharded tables, by one of several backends."""

from collective.strategies.base import Backend, Lookup, backend

__all__ = ["Backend", "Lookup", "backend"]

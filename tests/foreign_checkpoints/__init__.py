"""Writes checkpoints as DeepRec, HybridBackend and SparseOperationKit write them.

The formats are those of their sources, which each file names; nothing here uses the importers.
"""

"""Keys a batch ahead: those of batch i + 1 are exchanged while batch i computes
(`scope(prefetch_keys=True)`).
"""

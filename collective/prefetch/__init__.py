"""Exchanges the keys of batch i + 1 while batch i computes (`scope(prefetch_keys=True)`).

One rank checks and joins them then, and copies them to the GPU.
"""

"""Collectives, exchange and kernels: what a backend is made of. Knows nothing of strategies, scopes
or sessions.
"""

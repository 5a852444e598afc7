"""Carries collectives between ranks, each only when all ranks can take part."""

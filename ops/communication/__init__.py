"""Carries collectives between ranks, each only once all ranks can take part."""

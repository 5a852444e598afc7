"""Stands in for the modules of NVIDIA's distributed-embeddings."""

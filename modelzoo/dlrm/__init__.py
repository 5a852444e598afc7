"""Predicts clicks by DLRM: two networks, and the interaction of embeddings between them."""

"""Predicts clicks by DeepFM: a factorization machine and a deep network."""

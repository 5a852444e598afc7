"""Predicts clicks by DeepFM: a factorization machine beside a deep network."""

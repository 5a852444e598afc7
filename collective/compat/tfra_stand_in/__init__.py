"""Stands in for TensorFlow Recommenders Addons: its layers of dynamic embeddings, and the rest."""

"""Trains HybridBackend's Keras models: `hb.keras.Model`."""

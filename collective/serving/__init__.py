"""Exports SavedModels, whose tables are made of TensorFlow's own operations."""

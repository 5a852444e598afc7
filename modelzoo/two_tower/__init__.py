"""Finds items for users by two towers, trained by a sampled softmax."""

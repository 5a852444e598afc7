"""Answers with a trained model, in one process: `collective.InferenceContext`."""

"""Batches as they travel: arrays with names, checked once; bytes; datasets and feeds."""

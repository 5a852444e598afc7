"""Predicts clicks by DIN: attention to what a user clicked before."""

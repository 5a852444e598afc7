"""Predicts clicks by DCN-V2: a cross network next to a deep one."""

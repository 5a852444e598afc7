"""Predicts clicks by DCN-V2: a cross network beside a deep one."""

"""Reduces gradients over ranks, clips and accumulates them."""

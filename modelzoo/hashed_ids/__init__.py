"""Trains on 64-bit hashes that never stop coming, in tables of bounded memory."""

"""Tables: how they are made, where their rows come from and lie, how they are looked up and
updated.
"""

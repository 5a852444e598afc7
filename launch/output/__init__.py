"""Shows what ranks write, and reports how they ended."""

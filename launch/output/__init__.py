"""Shows the ranks' output, and reports how they ended."""

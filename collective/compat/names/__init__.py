"""Lists the names of each framework, and what replaces them here."""

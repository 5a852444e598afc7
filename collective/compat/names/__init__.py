"""Lists the names of each framework, and what stands for them here."""

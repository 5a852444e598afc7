"""Updates the rows of tables and their slots, and announces every write."""

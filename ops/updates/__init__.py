"""Updates rows of shards with compiled operations."""

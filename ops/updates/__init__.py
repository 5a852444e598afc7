"""Updates rows of shards by compiled operations."""

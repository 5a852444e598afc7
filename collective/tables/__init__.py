"""Makes tables, keeps their rows, looks them up and updates them."""

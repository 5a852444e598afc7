"""Shows what the planner chose: as text, as data, as a picture."""

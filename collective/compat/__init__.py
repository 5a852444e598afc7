"""Makes what scripts bring along from other libraries work inside scope()."""

"""The parts that the example programs share."""

"""Predicts from the census who earns more than 50,000 dollars a year."""

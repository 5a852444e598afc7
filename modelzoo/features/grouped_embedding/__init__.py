"""Holds programs whose lookups share exchanges, with the options of DeepRec's own."""

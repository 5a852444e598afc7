"""Converts checkpoints of DeepRec, HybridBackend and SparseOperationKit to this library's format.

source.py          describes what is read: tables by keys, ordinary variables
deeprec.py, hybridbackend.py, sok.py    read the formats
key_buckets.py     sorts rows by their keys, in files
conversion.py      writes the checkpoint, and reports
reader_choice.py   chooses the reader
"""

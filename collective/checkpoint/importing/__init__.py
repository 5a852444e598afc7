"""Makes checkpoints of this library of those of DeepRec, HybridBackend and SparseOperationKit.

source.py          what is read: tables by keys, ordinary variables
deeprec.py, hybridbackend.py, sok.py    read the formats
key_buckets.py     brings rows into the order of their keys, by files
conversion.py      writes the checkpoint, and reports
frameworks.py      chooses the reader
"""

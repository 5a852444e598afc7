"""A job file, `collective launch job.yaml`: a command line, and what a Trainer reads.

It drives the same launcher: each key becomes options and environment variables that exist without
a file. Determined's spellings are understood.
"""

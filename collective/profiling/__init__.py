"""Profiles training steps: traces of every rank, and a breakdown of the time that rank 0 prints.

    with strategy.scope(profile='profile', profile_steps=(11, 20)):
        ...

`profiler.py` counts training runs and has TensorFlow trace some of them (`trace.py`). Each
operation belongs to a phase (`phases.py`), and a run's lookups are counted (`lookup_counts.py`).
The ranks' measurements are combined (`breakdown.py`) and written: scalars (`summaries.py`), and
split.json with a page that shows it (`report_writer.py`; the page is made in
`collective.profiling.report`).
"""

"""Where the time of training steps goes: traces of every rank, and a split that rank 0 prints.

    with strategy.scope(profile='profile', profile_steps=(11, 20)):
        ...

`profiler.py` is the whole: it counts training runs, has TensorFlow trace some of them (`trace.py`),
says of each operation which phase it belongs to (`phases.py`), puts the ranks' measurements
together (`split.py`) and writes them (`summaries.py`).
"""

"""Describes what was built for a graph: its tables, their shards, and the exchanges of a step.

plan = strategy.plan()              # data, with to_dict() and to_json()
print(plan)                         # the table that rank 0 prints when training starts
"""

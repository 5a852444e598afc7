"""Describes what was built for a graph: its tables, their shards, and the exchanges of a step.

plan = strategy.plan()              # data, with to_dict() and to_json()
print(plan)                         # what rank 0 prints when training starts
print(plan.to_text(full=True)) # every table, without a limit
"""

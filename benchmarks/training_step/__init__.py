"""The parts of step.py and of the programs that it runs: workload, model, collectives, reports."""

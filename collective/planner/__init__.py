"""Chooses where the rows of tables are, by a model of a training step. Loads no TensorFlow.

    workload ──┐
               ├──► step_model ──► search ──► Forecast
    machines ──┘

Everything is a pure function of the tables and of figures about machines: the same input gives the
same plan on every rank, and there need be no machines.
"""

"""Stands in for Horovod in scripts of one host where it isn't installed.

`modules` puts it in the place of `horovod.tensorflow` and its neighbours.
"""

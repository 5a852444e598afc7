"""The kernels' functions in NumPy, with the same signatures: the truth against which the kernels
are checked. They need no workspace.
"""

"""The kernels' functions in NumPy, with the same signatures: what the kernels are held against. A
workspace is not needed.
"""

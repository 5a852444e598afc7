"""Has the kernels' functions in NumPy, with the same signatures: the truth that the kernels are
held to. A workspace is not needed.
"""

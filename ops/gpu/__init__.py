"""CUDA kernels of a group's exchange, launched by CuPy.

The package needs only CuPy and NumPy, and imports CuPy only when a `CupyDevice` is made. The
binding (`tensorflow_binding`, `row_finders`, `memory_bridge`, `device_key_map`) also needs
TensorFlow.

A kernel family consists of a `.cu` file; a module that launches it, whose docstring gives shapes,
undefined cases and the bytes moved; the same function in NumPy under `reference/`; and its checks
and measurements under `checks/`. Compiled operations (`ops/native/gpu/`) carry out a group's
exchange. They launch the same kernels on TensorFlow's own stream, and some kernels that only they
launch (`ask`, `bags`). `kernel_api` has what Python does in a step: it finds dynamic tables' keys.

Words: N ranks. S *sections*: keys and rows travel ordered by section; each belongs to one table. M
*segments*: runs of keys that belong to one section. K keys. A *tile* is the work of one block of
threads.
"""

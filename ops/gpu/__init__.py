"""CUDA kernels of a group's exchange, launched by CuPy.

Needs CuPy and NumPy only, and imports CuPy only where a `CupyDevice` is made. The binding
(`tensorflow_binding`, `row_finders`, `memory_bridge`, `device_key_map`) needs TensorFlow, too.

A kernel family is a `.cu` file, a module that launches it (whose page says shapes, what is
undefined and how many bytes are moved), the same function in NumPy under `reference/`, and its
checks and measurements under `checks/`. A group's exchange is made by compiled operations
(`ops/native/gpu/`), which launch the same kernels on TensorFlow's own stream, and some that only
they launch (`ask`, `bags`). `kernel_api` has what Python does in a step: it finds dynamic tables'
keys.

Words: N ranks. S *sections*: keys and rows travel ordered by section; each is of one table. M
*segments*: runs of keys that belong to one section. K keys. A *tile* is what one block of threads
works on.
"""

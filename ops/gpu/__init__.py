"""CUDA kernels of a group's exchange, launched by CuPy.

Needs CuPy and NumPy only, and imports CuPy only where a `CupyDevice` is made. A kernel family is a
`.cu` file, a module that launches it (whose page says shapes, what is undefined and how many bytes
are moved), the same function in NumPy under `reference/`, and its checks and measurements under
`checks/`.

Words: N ranks. S *sections*: what travels is ordered by section; each is of one table. M
*segments*: runs of keys that belong to one section. K keys. A *tile* is what one block of threads
works on.
"""

"""CUDA kernels of a group's exchange, launched by CuPy.

Needs CuPy and NumPy only, and imports CuPy only where a `CupyDevice` is made. The binding
(`tensorflow_binding`, `tensorflow_call`, `memory_bridge`, `device_key_map`) needs TensorFlow, too.

A kernel family is a `.cu` file, a module that launches it (whose page says shapes, what is
undefined and how many bytes are moved), the same function in NumPy under `reference/`, and its
checks and measurements under `checks/`. `kernel_api` has all of them as one object, with which
`requests`, `responses` and `pooling` write a group's exchange; `message_layout` says how messages
look. The rows of unpooled sections are gathered by a compiled operation (`ops/native/gpu/`), which
launches the same kernel on TensorFlow's own stream.

Words: N ranks. S *sections*: keys and rows travel ordered by section; each is of one table. M
*segments*: runs of keys that belong to one section. K keys. A *tile* is what one block of threads
works on.
"""

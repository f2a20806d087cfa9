"""Kernels: the operations on cached blocks, one signature, one file per backend.

``ops`` states the signatures and chooses a backend, ``reference`` is the PyTorch oracle that runs on
any torch device, ``cpu`` calls the native kernels.
"""

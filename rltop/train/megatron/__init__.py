"""The training backend: Megatron-Core, on one rank, on the CPU (gloo) or a GPU.

`backend.MegatronBackend` is the door. `compat` is the only module that imports `megatron`; importing this package loads
neither torch nor Megatron.
"""

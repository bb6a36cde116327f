"""What runs on the device: tensors and integers only, nothing of programs, requests or vLLM.

``reference`` defines the truth in plain torch, ``library`` registers the op that sits in the
compiled graph, ``site`` is the module that carries its buffers, ``attention`` reads attention from
paged keys.
"""

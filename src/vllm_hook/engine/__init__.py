"""The only seam to vLLM. Every private name of vLLM that we use is imported in ``compat``."""

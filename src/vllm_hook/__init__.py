"""vLLM Hook."""

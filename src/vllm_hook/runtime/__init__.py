"""From a batch to a step's plan, and from the step's buffers to results. torch, but no vLLM."""

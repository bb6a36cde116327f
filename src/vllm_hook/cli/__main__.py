"""``python -m vllm_hook.cli``: the same as ``vllm-hook``."""

from . import main

main()

"""Where the keys of a page lie, for every KV-cache layout that this package reads.

Layouts are those of vLLM 0.32. An unknown one is refused by name at start-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention

from ..errors import UnsupportedError
from ..ops.attention import PagedKeys, PageKeys
from ..ops.reference import AttentionRule
from ..runtime.collect import KeyReader

#: Instruction sets of the CPU backend that store a page's keys as [D, N].
_CPU_TRANSPOSED = ("vec", "vec16")


#: GPU backends whose unquantised cache is [blocks, KV heads, page, 2D] by strides, keys first.
_PAGED = ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")


def check_readable(attention: Attention) -> None:
    """Refuse what cannot be read, before the engine serves. The cache itself need not exist yet."""
    impl = attention.impl
    backend = attention.attn_backend.get_name()
    if backend != "CPU_ATTN" and backend not in _PAGED:
        raise UnsupportedError(
            f"attention sites: the KV cache of attention backend {backend} is not supported yet"
        )
    if str(attention.kv_cache_dtype).startswith(("fp8", "nvfp4", "int8")):
        raise UnsupportedError(
            f"attention sites: a KV cache of dtype {attention.kv_cache_dtype} is not supported"
        )
    if not hasattr(impl, "scale"):
        raise UnsupportedError(f"attention sites: {type(impl).__name__} (MLA?) is not supported")


def check_values_readable(dtype: torch.dtype, on_cpu: bool) -> None:
    """Refuse ``method: attend`` where vLLM will pick a layout whose values cannot be read."""
    if on_cpu and dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        raise UnsupportedError(
            "method attend: the bfloat16 KV cache of CPUs with AMX cannot be read; use float32"
        )


def key_reader(attention: Attention) -> KeyReader:
    """Reader of one layer's keys, with the layer's own scale, window, soft-cap, sinks and ALiBi."""
    cache = attention.kv_cache
    return KeyReader(
        page_keys=cpu_page_keys(cache, attention.isa, attention.head_size),
        page_values=lambda page, head: cpu_page_values(cache, attention.isa, attention.head_size)(page, head),
        page_size=cache.shape[2],
        group=attention.num_heads // attention.num_kv_heads,
        rule=attention_rule(attention),
    )


def paged_keys(attention: Attention, block_table: Tensor) -> PagedKeys:
    """One layer's cache on a GPU, as the kernels read it."""
    cache = attention.kv_cache
    if cache.dim() != 4 or cache.shape[3] != 2 * attention.head_size:
        raise UnsupportedError(
            f"attention sites: the KV cache of {attention.layer_name} has the unknown shape "
            f"{tuple(cache.shape)}"
        )
    group = attention.num_heads // attention.num_kv_heads
    return PagedKeys(cache, block_table, group, attention_rule(attention))


def attention_rule(attention: Attention) -> AttentionRule:
    impl: Any = attention.impl
    window = impl.sliding_window
    if isinstance(window, tuple):  # FlashAttention: (left, right), without the query itself
        window = window[0] + 1 if window[0] >= 0 else None
    slopes = impl.alibi_slopes
    return AttentionRule(
        scale=float(impl.scale),
        window=window if window is not None and window > 0 else None,
        soft_cap=float(impl.logits_soft_cap) if impl.logits_soft_cap else None,
        sinks=getattr(impl, "sinks", None),
        alibi=None if slopes is None else torch.as_tensor(slopes, device=attention.kv_cache.device),
    )


def cpu_page_keys(cache: Tensor, isa: str, width: int) -> PageKeys:
    """CPU backend: [pages, KV heads, N, 2D]; of each head's 2ND values the first half are keys.

    ``vec``: keys [D, N], used where they lie. ``amx`` (bf16): keys [N/16, D/2, 16, 2], two
    neighbouring widths side by side; a page is re-ordered as it is read.
    """
    pages, kv_heads, size, _ = cache.shape
    keys = cache.view(pages, kv_heads, 2, size * width)[:, :, 0]
    if isa in _CPU_TRANSPOSED:
        transposed = keys.view(pages, kv_heads, width, size)
        return lambda page, head: transposed[page, head]
    if isa == "amx" and cache.dtype == torch.bfloat16:
        tiles = keys.view(pages, kv_heads, size // 16, width // 2, 16, 2)
        return lambda page, head: tiles[page, head].permute(1, 3, 0, 2).reshape(width, size)
    raise UnsupportedError(
        f"attention sites: the CPU KV-cache layout {isa!r} ({cache.dtype}) is not supported"
    )


def cpu_page_values(cache: Tensor, isa: str, width: int) -> PageKeys:
    """CPU backend: values of a page and KV head, [N, D], a view; the second half of each head's 2ND."""
    pages, kv_heads, size, _ = cache.shape
    if isa not in _CPU_TRANSPOSED:
        raise UnsupportedError(f"method attend: values of the CPU KV-cache layout {isa!r} cannot be read yet")
    values = cache.view(pages, kv_heads, 2, size * width)[:, :, 1].view(pages, kv_heads, size, width)
    return lambda page, head: values[page, head]


def page_list(table_row: Sequence[int] | Tensor, keys: int, page_size: int) -> list[int]:
    """The first pages of a block-table row, enough for ``keys`` keys."""
    n = -(-keys // page_size)
    row = table_row[:n]
    return [int(page) for page in row]

"""Attention read from pages against attention over contiguous keys, for every layout of the CPU build."""

import pytest
import torch

from vllm_hook.engine.kv_cache import cpu_page_keys, page_list
from vllm_hook.errors import UnsupportedError
from vllm_hook.ops import attention as paged
from vllm_hook.ops import reference
from vllm_hook.ops.reference import AttentionRule

H, G, D, N = 4, 2, 32, 32  # query heads, KV heads, width, tokens a page

RULES = {
    "plain": AttentionRule(0.2),
    "window": AttentionRule(0.2, window=20),
    "window-of-one": AttentionRule(0.2, window=1),
    "window-of-pages": AttentionRule(0.2, window=64),
    "soft-cap": AttentionRule(0.5, soft_cap=3.0),
    "sinks": AttentionRule(0.2, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "alibi": AttentionRule(0.2, alibi=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "all": AttentionRule(
        0.4,
        window=40,
        soft_cap=4.0,
        sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]),
        alibi=torch.tensor([0.1, 0.2, 0.05, 0.3]),
    ),
}


def sequence(keys, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(keys, heads, D, generator=g).to(dtype) for heads in (H, G, G))
    return q, k, v


def pages_of(keys, seed=0, pool=40):
    g = torch.Generator().manual_seed(seed)
    return torch.randperm(pool, generator=g)[: -(-keys // N)].tolist()


def vec_cache(k, pages, pool=40):
    """[pages, KV heads, N, 2D]; keys of a page as [D, N] in the first half. The rest is noise."""
    cache = torch.full((pool, G, N, 2 * D), 1e6, dtype=k.dtype)
    flat = cache.view(pool, G, 2, N * D)
    for j in range(len(k)):
        flat[pages[j // N], :, 0].view(G, D, N)[:, :, j % N] = k[j]
    return cache


def amx_cache(k, pages, pool=40):
    """Keys of a page as [N/16, D/2, 16, 2]: tiles of 16 tokens, two neighbouring widths side by side."""
    cache = torch.full((pool, G, N, 2 * D), 1e6, dtype=k.dtype)
    flat = cache.view(pool, G, 2, N * D)
    for j in range(len(k)):
        n = j % N
        tiles = flat[pages[j // N], :, 0].view(G, N // 16, D // 2, 16, 2)
        for d in range(D):
            tiles[:, n // 16, d // 2, n % 16, d % 2] = k[j, :, d]
    return cache


def rows(q, positions, heads, pages, read, rule):
    return paged.attention_rows(q[positions], positions, heads, pages, read, N, H // G, rule)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keys", [1, 31, 32, 33, 200])
def test_vec_pages_against_contiguous(rule, keys):
    q, k, _ = sequence(keys, seed=keys)
    pages = pages_of(keys, seed=keys)
    positions = sorted({0, keys // 3, keys // 2, keys - 1})
    heads = [3, 0, 2]
    got = rows(q, positions, heads, pages, cpu_page_keys(vec_cache(k, pages), "vec", D), RULES[rule])
    want = reference.attention(q[positions], k, torch.tensor(positions), torch.tensor(heads), RULES[rule])
    assert got.shape == (3, len(positions), keys)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_reference_against_a_plain_loop():
    """The reference itself, from the definition."""
    rule = RULES["all"]
    q, k, _ = sequence(50)
    got = reference.attention(q[[45]], k, torch.tensor([45]), torch.tensor([3]), rule)[0, 0]
    logits = torch.full((50,), float("-inf"), dtype=torch.float64)
    for j in range(46 - 40, 46):
        s = float(q[45, 3].double() @ k[j, 1].double()) * 0.4
        logits[j] = 4.0 * torch.tanh(torch.tensor(s / 4.0, dtype=torch.float64)) + 0.3 * (j - 45)
    weights = logits.exp()
    want = weights / (weights.sum() + torch.tensor(0.0, dtype=torch.float64).exp())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", RULES)
def test_amx_pages_against_contiguous(rule):
    q, k, _ = sequence(100, dtype=torch.bfloat16)
    pages = pages_of(100)
    positions = [3, 64, 99]
    got = rows(q, positions, [1, 2], pages, cpu_page_keys(amx_cache(k, pages), "amx", D), RULES[rule])
    want = reference.attention(q[positions], k, torch.tensor(positions), torch.tensor([1, 2]), RULES[rule])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_layouts_are_not_interchangeable():
    """A cache read in the wrong layout is wrong: the comparison above can fail."""
    q, k, _ = sequence(100, dtype=torch.bfloat16)
    pages = pages_of(100)
    right = rows(q, [99], [1], pages, cpu_page_keys(amx_cache(k, pages), "amx", D), RULES["plain"])
    wrong = rows(q, [99], [1], pages, cpu_page_keys(vec_cache(k, pages), "amx", D), RULES["plain"])
    assert float((right - wrong).abs().max()) > 0.01


@pytest.mark.parametrize(
    ("isa", "dtype"), [("neon", torch.float32), ("amx", torch.float32), ("rvv", torch.bfloat16)]
)
def test_unknown_layout_is_refused(isa, dtype):
    with pytest.raises(UnsupportedError, match=isa):
        cpu_page_keys(torch.zeros(2, G, N, 2 * D, dtype=dtype), isa, D)


@pytest.mark.parametrize(
    ("isa", "dtype"), [("vec", torch.float32), ("vec", torch.bfloat16), ("amx", torch.bfloat16)]
)
def test_cache_written_by_vllm(isa, dtype):
    """The cache as vLLM's own op writes it."""
    import vllm._custom_ops  # noqa: F401  (registers torch.ops._C)

    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    keys = 150
    q, k, v = sequence(keys, dtype=dtype)
    pages = pages_of(keys)
    cache = torch.zeros(40, G, N, 2 * D, dtype=dtype)
    slots = torch.tensor([pages[j // N] * N + j % N for j in range(keys)], dtype=torch.int64)
    write(k, v, cache, slots, isa)
    positions = [0, 77, 149]
    got = rows(q, positions, [0, 1, 2, 3], pages, cpu_page_keys(cache, isa, D), RULES["plain"])
    want = reference.attention(q[positions], k, torch.tensor(positions), torch.arange(4), RULES["plain"])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def write(k, v, cache, slots, isa):
    pool = cache.shape[0]
    halves = cache.view(pool, G, 2, N * D)
    key_cache, value_cache = (halves[:, :, i].view(pool, G, N, D) for i in range(2))
    torch.ops._C.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, slots, isa)


@pytest.mark.parametrize("rule", ["plain", "window", "sinks", "all"])
def test_mass_is_the_sum_over_spans(rule):
    q, k, _ = sequence(120)
    pages = pages_of(120)
    read = cpu_page_keys(vec_cache(k, pages), "vec", D)
    positions = [5, 60, 119]
    spans = [[(0, 1)], [(3, 40)], [(0, 2), (50, 61), (110, 120)], [(0, 120)]]
    got = paged.attention_mass(q[positions], positions, [2, 0], spans, pages, read, N, H // G, RULES[rule])
    probs = reference.attention(q[positions], k, torch.tensor(positions), torch.tensor([2, 0]), RULES[rule])
    want = torch.stack([sum(probs[..., a:b].sum(-1) for a, b in ranges) for ranges in spans], dim=-1)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    if RULES[rule].sinks is None:
        torch.testing.assert_close(got[..., 3], torch.ones(2, 3), rtol=0, atol=1e-5)
    else:
        assert float(got[..., 3].max()) < 1 - 1e-3  # the sink has its share


def test_rows_in_blocks_are_the_same(monkeypatch):
    q, k, _ = sequence(150)
    pages = pages_of(150)
    read = cpu_page_keys(vec_cache(k, pages), "vec", D)
    positions = list(range(150))
    whole = paged.attention_mass(q, positions, [0, 3], [[(0, 9)]], pages, read, N, H // G, RULES["window"])
    monkeypatch.setattr(paged, "LOGIT_BYTES", 4 * 2 * 150 * 7)
    blocks = paged.row_blocks(positions, 2)
    assert blocks[0] == (0, 7)
    assert [i for a, b in blocks for i in range(a, b)] == positions
    cut = paged.attention_mass(q, positions, [0, 3], [[(0, 9)]], pages, read, N, H // G, RULES["window"])
    torch.testing.assert_close(cut, whole, rtol=1e-6, atol=1e-7)
    assert paged.row_blocks([], 2) == []


def test_pages_before_the_window_are_never_read():
    q, k, _ = sequence(200)
    pages = pages_of(200)
    read, seen = cpu_page_keys(vec_cache(k, pages), "vec", D), set()

    def recording(page, head):
        seen.add(page)
        return read(page, head)

    rows(q, [150, 199], [0], pages, recording, AttentionRule(0.2, window=10))
    assert seen == set(pages[(150 - 9) // N :])


def test_page_list():
    assert page_list(torch.tensor([7, 3, 9, 0, 0], dtype=torch.int32), 33, 32) == [7, 3]
    assert page_list([7, 3, 9], 32, 32) == [7]

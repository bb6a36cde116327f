"""vLLM's cache of compiled code: one made without us is not used with us, and the reverse."""

import pytest

from child import told_by
from conftest import GPU

pytestmark = [pytest.mark.engine, pytest.mark.skipif(GPU, reason="scripts/gpu_check.py does this there")]


def start(model, mode, cache):
    env = {"VLLM_CACHE_ROOT": str(cache), "VLLM_LOGGING_LEVEL": "INFO"}
    result, output = told_by("compile_case.py", str(model), mode, timeout=400, **env)
    return result, "Directly load AOT compilation" in output


def test_caches_made_with_and_without_us(tiny_dir, tmp_path):
    """Each kind of engine compiles for itself, whichever came first, and then finds its own again. All give
    the same bits, since the layers around a site are compiled as without it."""
    model = tiny_dir("llama")
    starts = [("a", "plain"), ("a", "hooked"), ("a", "plain"), ("b", "hooked"), ("b", "plain")]
    told = [start(model, mode, tmp_path / cache) for cache, mode in starts]
    assert [found for _, found in told] == [False, False, True, False, False]
    results = [result for result, _ in told]
    hooked = [result for result in results if result["rows"] is not None]
    assert len(hooked) == 2
    assert hooked[0]["rows"] == hooked[1]["rows"]
    assert [len(rows[0]) for rows in hooked[0]["rows"]] == [7, 7, 7]  # the last token is not fed
    assert any(x != 0 for x in hooked[0]["rows"][0][0][0])
    for result in results:
        assert result["tokens"] == results[0]["tokens"]
        assert result["bits"] == results[0]["bits"]

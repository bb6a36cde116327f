"""The graph pass that lets sites read a norm's addends, on a graph like a decoder layer's."""

import numpy as np
import pytest
import torch
from vllm import ir
from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass
from vllm.config import VllmConfig

from vllm_hook.engine.graph_pass import SplitResiduals
from vllm_hook.ops.library import edit, tap
from vllm_hook.ops.site import Site
from vllm_hook.runtime.area import AreaSize, StepArea
from vllm_hook.runtime.plan import StepPlan

PLACE, WIDTH = ("resid_post", 0), 16
SEEN: list[int] = []  # the compiler copies a pass


class Seen(SplitResiduals):
    """The pass, how many addends each site had after it, and what vLLM does next."""

    def __call__(self, graph):
        super().__call__(graph)
        for node in graph.nodes:
            if node.op == "call_function" and node.args and node.args[0] in (edit.default, tap.default):
                SEEN.append(sum(node.kwargs.get(name) is not None for name in ("residual", "addend")))
        VllmIRLoweringPass(VllmConfig())(graph)


def compiled(f, v2):
    SEEN.clear()
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": Seen(), "enable_auto_functionalized_v2": v2}
    return torch.compile(f, fullgraph=True, options=options)


def layer(site, dtype, before):
    """(attention's output, residual) -> the next layer's input and the stream; a site between them."""
    torch.manual_seed(0)
    o, up, g = (torch.randn(WIDTH, WIDTH).to(dtype), torch.randn(WIDTH, WIDTH).to(dtype), torch.ones(WIDTH))
    g = g.to(dtype)

    def f(z, residual):
        n, residual = ir.ops.fused_add_rms_norm(before(z @ o), residual, g, 1e-5)
        h = n @ up
        if site is not None:
            site(h, residual)
        return ir.ops.fused_add_rms_norm(h, residual, g, 1e-5)

    return f


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])  # forms of functional ops; vLLM uses v1
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fused", [False, True], ids=["product", "fused"])
def test_a_site_reads_what_is_in_memory(dtype, fused, v2):
    """Both addends, where both are, and then it changes no bit of what the compiler makes of the layer;
    else their sum, which is rounded for it. Either way it takes the stream as the next norm has it."""
    area = StepArea(AreaSize({PLACE: 8}, frozenset(), 0, 0), torch.device("cpu"))
    site = Site(area.live, area.headers[PLACE], area.step, torch.zeros(8, WIDTH, dtype=dtype), None)
    before = torch.relu if fused else (lambda x: x)
    z, r = torch.randn(8, WIDTH).to(dtype), torch.randn(8, WIDTH).to(dtype)
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with torch.no_grad(), uncached, ir.enable_torch_wrap(True):
        plain = compiled(layer(None, dtype, before), v2)(z, r)
        run = compiled(layer(site, dtype, before), v2)
        run(z, r)
        area.load(StepPlan((np.asarray([1, 5], dtype=np.int32),), {PLACE: 0}, ()), None)
        hooked = run(z, r)
    assert [1 if fused else 2] == SEEN
    assert int(site.fired) == 1
    assert torch.equal(site.buf[:2], hooked[1][[1, 5]])
    for mine, theirs in zip(hooked, plain, strict=True):
        if fused:
            torch.testing.assert_close(mine, theirs, rtol=0.05, atol=0.05)
        else:
            assert torch.equal(mine, theirs)

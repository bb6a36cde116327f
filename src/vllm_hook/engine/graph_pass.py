"""A pass over the compiled graph: sites read the two addends of a residual, not their sum.

vLLM's norms add the residual as they go, ``normed, residual = fused_add_rms_norm(x, residual)``, and the
compiler keeps the sum in registers: the next norm adds the two again, unrounded. A site that takes the
sum as one tensor makes the compiler write it to memory in every layer, rounded, and the next norm read
it: an idle site would cost time, and an armed engine would not give plain vLLM's bits. So a site is
given what is in memory anyway, both addends, and adds them up itself.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator
from torch.fx.node import Node
from vllm import ir
from vllm.compilation.passes.inductor_pass import InductorPass
from vllm.platforms import current_platform

from ..ops.library import edit, tap

_OPS = (edit.default, tap.default)


class SplitResiduals(InductorPass):  # type: ignore[misc]
    """``residual`` of a site -> ``residual, addend``. Runs before vLLM's norms are lowered."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if not _is_site(node) or node.kwargs.get("addend") is not None:
                continue
            parts = _addends(node.kwargs.get("residual"))
            if parts is not None:
                node.kwargs = {**node.kwargs, "residual": parts[0], "addend": parts[1]}

    def uuid(self) -> str:
        """Code compiled before a change of the pass is not found again."""
        return str(InductorPass.hash_source(type(self), _is_site, _addends, _in_memory))


def install(config: Any) -> None:
    """Before the model is made, which copies what its compiler is told. A pass of the user's own keeps its
    place: sites read the sum then."""
    config.compilation_config.inductor_compile_config.setdefault(current_platform.pass_key, SplitResiduals())


def _is_site(node: Node) -> bool:
    """A call of one of our ops, in the functional form that it has here."""
    return node.op == "call_function" and bool(node.args) and node.args[0] in _OPS


def _addends(residual: Any) -> tuple[Node, Node] | None:
    """What a norm added up to ``residual``, if both lie in memory when the site runs."""
    if not isinstance(residual, Node) or residual.target is not operator.getitem or residual.args[1] != 1:
        return None
    norm: Any = residual.args[0]
    if norm.target is not ir.ops.fused_add_rms_norm.torch_op:
        return None
    x, before = norm.args[:2]
    chosen = ir.ops.fused_add_rms_norm.dispatch(*(_fake(arg) for arg in norm.args))
    # A kernel that writes the sum over one of its inputs has it in memory, and not them.
    return None if chosen.inplace or not (_in_memory(x) and _in_memory(before)) else (x, before)


def _fake(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg


def _in_memory(node: Node) -> bool:
    """Inputs of the graph, products, and what opaque ops return or write; the rest the compiler fuses."""
    if node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
        return isinstance(node.target, HigherOrderOperator)
    if node.op == "placeholder":
        return True
    name = str(node.target)
    return name in ("aten.mm.default", "aten.addmm.default") or not name.startswith(
        ("aten.", "prims.", "vllm_ir.", "<")
    )

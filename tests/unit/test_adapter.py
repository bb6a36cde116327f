"""What the adapters of both model runners share."""

import resource
import sys
from types import SimpleNamespace

import pytest

from vllm_hook.engine import adapter


def inner(x):
    return x


def layer(call):
    a = b = c = d = e = f = g = h = i = j = k = m = n = 1  # a frame of some size
    return call(a + b + c + d + e + f + g + h + i + j + k + m + n)


def faults(depth, times=300):
    """Pages that came anew while functions were called so deep in the stack, over and over."""
    if depth:
        return faults(depth - 1, times)
    layer(inner)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(times):
        layer(inner)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.skipif(sys.platform != "linux", reason="counts faults of a thread")
def test_calls_in_a_roomy_one_never_map_memory():
    depths = range(260)
    if sys.version_info >= (3, 11):  # before, frames were objects
        assert max(faults(n) for n in depths) >= 300
    assert max(adapter._roomy(faults, n) for n in depths) < 100


@pytest.mark.parametrize(("tokens", "roomy"), [([1, 1], False), ([1, 7], True), ([64], True)])
def test_steps_with_a_prompt_have_room(tokens, roomy):
    ran = []

    class Adapter(adapter.RunnerAdapter):
        prepare = "prepare_inputs"

        def __init__(self):
            def execute_model(scheduler_output, extra):
                caller = sys._getframe(1).f_code
                ran.append(caller is adapter._roomy.__code__)
                return extra

            self._execute_model = execute_model
            self.hook = SimpleNamespace(begin=lambda *_: None, forward_done=lambda: None)

    step = SimpleNamespace(
        num_scheduled_tokens={str(i): n for i, n in enumerate(tokens)}, total_num_scheduled_tokens=sum(tokens)
    )
    assert Adapter().run_step(lambda new: 0, step, extra=5) == 5
    assert ran == [roomy]

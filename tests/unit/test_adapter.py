"""What the adapters of both model runners share, and what leaves a step and a request."""

import copy
import pickle
import resource
import sys
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_hook.engine import adapter
from vllm_hook.engine.receive import Payload
from vllm_hook.engine.runner import OUTPUT_KEY, RunnerHook
from vllm_hook.runtime.rows import Record


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


class Later(AsyncModelRunnerOutput):
    """An asynchronous output of the engine."""

    def get_output(self):
        return SimpleNamespace()


def test_rows_that_are_read_when_the_engine_is_shut_down():
    """The hook is empty then; the memory that was lent is given back all the same."""
    hook = object.__new__(RunnerHook)
    back = []
    hook._taken, hook._copied, hook._lost = [], None, {"a": "lost"}
    hook.transfer = SimpleNamespace(lent=lambda: ["place"], take_back=back.append)
    output = hook.attach(Later())
    vars(hook).clear()
    assert getattr(output.get_output(), OUTPUT_KEY) == ({}, [], {"a": "lost"})
    assert back == [["place"]]


def test_workers_in_other_processes_are_sent_plain_data():
    """Of a request's payload the front end keeps what it needs besides: locks, too."""
    data = Payload({"watch": []})
    data.context, data.samples = object(), 1
    data.give_back = partial(lambda lock: None, threading.RLock())
    sent = pickle.loads(pickle.dumps(data))
    assert (type(sent), sent) == (dict, {"watch": []})
    assert copy.deepcopy({"p": data})["p"] is data


def test_what_is_held_is_given_back_once():
    told = []
    held = Payload()
    held.samples, held.give_back = 2, lambda: told.append(1)
    held.ended()
    assert not told
    held.ended()
    held.release()
    del held
    assert told == [1]
    lost = Payload()
    lost.give_back = lambda: told.append(2)
    del lost
    assert told == [1, 2]


def test_a_request_does_not_carry_the_rows_of_its_neighbour():
    """Pickle writes all of the memory of a tensor."""
    whole = torch.arange(8.0).view(2, 1, 4)
    for half in whole:
        own = Record(0, np.zeros(1), half[None]).owned().values
        assert own.untyped_storage().nbytes() == own.nbytes == 16
    assert Record(0, np.zeros(1), whole).owned().values.data_ptr() == whole.data_ptr()

"""Loading, listing and unloading programs on a running engine, synchronous or not."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import VLLMClientError

from ..errors import HookError, UnsupportedError
from ..runtime.loading import LoadedProgram, load_program
from .frontend import Frontend
from .settings import parse_config, raw_config, read_settings

#: Attribute of a vLLM engine that holds our front end; absent on engines that are not configured.
ENGINE_KEY = "_vllm_hook"

RPC = "vllm_hook_rpc"


_NO_WORKER = (
    "a worker runs without vLLM Hook, so nothing would be observed; "
    "name vllm_hook in VLLM_PLUGINS if that is set, and install vllm-hook for every worker"
)


def _check_replies(replies: Any) -> None:
    if any(reply is None for reply in replies):
        raise UnsupportedError(_NO_WORKER)


def frontend_of(engine: Any) -> Frontend:
    """The front end of an ``LLMEngine`` or ``AsyncLLM``."""
    frontend = getattr(engine, ENGINE_KEY, None)
    if frontend is None:
        raise UnsupportedError(
            "this engine was started without vLLM Hook: give additional_config={'vllm_hook': {...}}, "
            "and name vllm_hook in VLLM_PLUGINS if that is set"
        )
    assert isinstance(frontend, Frontend)
    return frontend


def _attach(engine: Any) -> Frontend:
    settings = read_settings(engine.vllm_config)
    assert settings is not None
    frontend = Frontend(engine, settings)
    setattr(engine, ENGINE_KEY, frontend)
    for source in parse_config(raw_config(engine.vllm_config)).programs:
        frontend.add_program(load_program(source, settings.facts))
    return frontend


def attach_sync(engine: Any) -> None:
    """After ``LLMEngine.__init__``: the workers are up and take the programs' tensors at once."""
    _attach(engine)
    try:
        replies = engine.collective_rpc(RPC, args=("status",))
    except Exception as error:
        raise UnsupportedError(_NO_WORKER) from error
    _check_replies(replies)
    flush(engine)
    add_request = engine.add_request

    def add_request_after_flush(*args: Any, **kwargs: Any) -> Any:
        flush(engine)
        return add_request(*args, **kwargs)

    engine.add_request = add_request_after_flush


def attach_async(engine: Any) -> None:
    """After ``AsyncLLM.__init__``: tensors go to the workers before the first request does."""
    _attach(engine)
    add_request = engine.add_request
    checked = False

    async def add_request_after_flush(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if not checked:
            try:
                replies = await engine.collective_rpc(RPC, args=("status",))
            except Exception as error:
                raise UnsupportedError(_NO_WORKER) from error
            _check_replies(replies)
            checked = True
        await flush_async(engine)
        try:
            return await add_request(*args, **kwargs)
        except HookError as error:
            error.__class__ = _client_class(type(error))
            raise

    engine.add_request = add_request_after_flush


def _client_class(kind: type[HookError]) -> type[HookError]:
    """The same error, as a fault of the client: AsyncLLM hides all others behind EngineGenerateError."""
    return type(kind.__name__, (kind, VLLMClientError), {"__module__": kind.__module__})


def flush(engine: Any) -> None:
    """Send what waits for the workers."""
    outbox = frontend_of(engine).outbox
    while outbox:
        engine.collective_rpc(RPC, args=outbox.pop(0))


async def flush_async(engine: Any) -> None:
    outbox = frontend_of(engine).outbox
    while outbox:
        message = outbox.pop(0)
        await engine.collective_rpc(RPC, args=message)


def load(engine: Any, source: Any) -> LoadedProgram:
    """Load or replace a program on an ``LLMEngine``. New requests see it; running ones keep theirs."""
    loaded = frontend_of(engine).load(source)
    flush(engine)
    return loaded


async def load_async(engine: Any, source: Any) -> LoadedProgram:
    """The same on an ``AsyncLLM``."""
    loaded = frontend_of(engine).load(source)
    await flush_async(engine)
    return loaded


def status(engine: Any) -> dict[str, Any]:
    """What the (first) worker of an ``LLMEngine`` says it holds."""
    reply: dict[str, Any] = engine.collective_rpc(RPC, args=("status",))[0]
    return reply

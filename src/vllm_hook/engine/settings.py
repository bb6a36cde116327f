"""``additional_config["vllm_hook"]``: what the user gives, and the canonical form all processes see.

The user gives ``{"programs": [...], "arm": {...}}``. The front end reads the programs, works out
which sites they need, and writes ``armed``: the sorted list of ``[site, layer, rows]``. Only that
list and the version of our ops enter vLLM's compile-cache key: a renamed program file must not
cost a cold compile, and a cache made without us must not be used with us.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm import envs
from vllm.config import VllmConfig

from ..errors import Problem, ProgramError, SiteError, UnsupportedError
from ..ops.library import OPS_VERSION
from ..runtime.buffers import site_bytes
from ..runtime.loading import LoadedProgram, load_program
from ..sites import SITES, Armed, ModelFacts, site
from ..suggest import unknown

CONFIG_KEY = "vllm_hook"


class ArmSpec(BaseModel):
    """Layers of one site, and how many rows a step of each."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    layers: Literal["all"] | list[int] = "all"
    rows: Literal["last", "all"] = "all"
    edit: bool = True


class HookConfig(BaseModel):
    """``additional_config["vllm_hook"]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    programs: list[str | dict[str, Any]] = Field(default_factory=list)
    arm: dict[str, ArmSpec] = Field(default_factory=dict)
    slots: int = Field(default=64, ge=1, le=4096)
    layers_up_to: int | None = Field(default=None, ge=1)
    local: bool = False
    armed: list[tuple[str, int, Literal["last", "all", "edit"]]] | None = None


@dataclass(frozen=True)
class Settings:
    """Parsed settings of a configured engine."""

    armed: Armed
    facts: ModelFacts
    last_rows: int
    all_rows: int
    requests: int
    slots: int

    def bytes(self, item: int) -> int:
        """Device memory of the armed sites in bytes; ``item``: bytes of a value."""
        return site_bytes(
            self.armed, self.facts, self.last_rows, self.all_rows, self.requests, self.slots, item
        )


def raw_config(config: VllmConfig) -> Mapping[str, Any] | None:
    """The user's section, or None when this engine is not ours."""
    extra = config.additional_config
    return extra.get(CONFIG_KEY) if isinstance(extra, dict) else None


def parse_config(raw: Any) -> HookConfig:
    try:
        return HookConfig.model_validate(raw)
    except ValidationError as error:
        problems = [Problem(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
        raise ProgramError(f"additional_config[{CONFIG_KEY!r}]", problems) from None


def model_facts(config: VllmConfig) -> ModelFacts:
    """Sizes of the whole model, before any split between ranks."""
    model = config.model_config
    return ModelFacts(
        id=str(model.model),
        layers=int(model.get_total_num_hidden_layers()),
        heads=int(model.model_arch_config.total_num_attention_heads),
        kv_heads=int(model.get_total_num_kv_heads()),
        head_dim=int(model.get_head_size()),
        hidden=int(model.get_hidden_size()),
    )


def read_settings(config: VllmConfig) -> Settings | None:
    """Settings as any process sees them; None when the engine is not configured for us."""
    raw = raw_config(config)
    if raw is None:
        return None
    parsed = parse_config(raw)
    if parsed.armed is None:
        raise UnsupportedError(
            "vLLM Hook was configured, but its plug-in did not run when the engine's configuration was made; "
            "build the configuration with EngineArgs, and name vllm_hook in VLLM_PLUGINS if that is set"
        )
    scheduler = config.scheduler_config
    speculative = config.speculative_config
    drafts = int(speculative.num_speculative_tokens or 0) if speculative is not None else 0
    return Settings(
        armed=Armed.from_json(parsed.armed),
        facts=model_facts(config),
        last_rows=min(scheduler.max_num_seqs * (1 + drafts), scheduler.max_num_batched_tokens),
        all_rows=scheduler.max_num_batched_tokens,
        requests=scheduler.max_num_seqs,
        slots=parsed.slots,
    )


def complete_config(config: VllmConfig) -> list[LoadedProgram]:
    """Front end, once: read the programs, refuse what cannot work, write ``armed`` into the configuration."""
    parsed = parse_config(raw_config(config))
    _refuse(config)
    facts = model_facts(config)
    loaded = [load_program(program, facts) for program in parsed.programs]
    armed = arm_set(parsed.arm, facts)
    for program in loaded:
        armed = armed | program.needs
    # A dict of its own: the user's may serve for another engine.
    section = {
        "programs": list(parsed.programs),
        "arm": {name: spec.model_dump() for name, spec in parsed.arm.items()},
        "slots": parsed.slots,
        "layers_up_to": parsed.layers_up_to,
        "armed": armed.to_json(),
    }
    config.additional_config = {**config.additional_config, CONFIG_KEY: section}
    return loaded


def mark_local(config: VllmConfig) -> None:
    """Scheduler, worker and front end of this engine share a process: rows need no serializing."""
    config.additional_config = {
        **config.additional_config,
        CONFIG_KEY: {**(raw_config(config) or {}), "local": True},
    }


def arm_set(arm: Mapping[str, ArmSpec], facts: ModelFacts) -> Armed:
    """Sites listed under ``arm``."""
    armed = Armed()
    for name, spec in arm.items():
        if name not in SITES:
            raise SiteError(f"arm: {unknown('site', name, SITES)}")
        every = facts.site_layers(name)
        layers = every if spec.layers == "all" or not site(name).layered else tuple(spec.layers)
        layers = tuple(layer + facts.layers if layer < 0 else layer for layer in layers)
        if bad := [layer for layer in layers if layer not in every]:
            raise SiteError(
                f"arm.{name}.layers: {bad} out of range; the model has layers 0 to {facts.layers - 1}"
            )
        armed = armed | Armed.of(name, layers, spec.rows)
        if spec.edit and site(name).kind != "attention":
            armed = armed | Armed.of_edits(name, layers)
    return armed


def cache_factors(config: VllmConfig) -> dict[str, Any]:
    """What we contribute to the compile-cache key."""
    raw = raw_config(config) or {}
    return {"ops": OPS_VERSION, "armed": raw.get("armed")}


def _refuse(config: VllmConfig) -> None:
    """Set-ups that are not proven yet. Each message names the setting."""
    parallel, speculative = config.parallel_config, config.speculative_config
    ahead = speculative is not None and config.scheduler_config.async_scheduling
    servers = getattr(parallel, "_api_process_count", 1)
    reasons = [
        # The host then only knows upper bounds of positions; rows would be taken under wrong ones.
        (ahead, "speculative decoding with asynchronous scheduling (async_scheduling=False works)"),
        # How many drafts a step runs is then decided on the device: the host plans for rows that are not run.
        (
            getattr(speculative, "enable_adaptive_verification", False),
            "enable_adaptive_verification=True in speculative_config (False works)",
        ),
        # Slots are counted, programs unloaded and small rows delivered as if one front end had all requests.
        (servers > 1, f"api_server_count={servers} (1 works)"),
        # It reads the engine's outputs by itself: programs would not be admitted, rows not taken out.
        (envs.VLLM_USE_RUST_FRONTEND, "VLLM_USE_RUST_FRONTEND=1 (0 works)"),
        (parallel.pipeline_parallel_size > 1, f"pipeline_parallel_size={parallel.pipeline_parallel_size}"),
        (parallel.data_parallel_size > 1, f"data_parallel_size={parallel.data_parallel_size}"),
        (getattr(parallel, "enable_dbo", False), "enable_dbo"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "decode_context_parallel_size"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill_context_parallel_size"),
        (config.lora_config is not None, "enable_lora"),
        (config.model_config.runner_type != "generate", f"runner={config.model_config.runner_type!r}"),
    ]
    bad = [what for wrong, what in reasons if wrong]
    if bad:
        raise UnsupportedError(f"vLLM Hook does not support {', '.join(bad)} yet")

"""Find the attention heads that show prompt injection (Attention Tracker, arXiv 2411.00348).

Offline: Hugging Face runs the model with eager attention in float32 and this module reads the last
row. Shapes: N prompts, L layers, H query heads. ``python -m vllm_hook.build.heads --model DIR``
writes the program that ships as ``programs/smollm2-injection-guard.yaml``, with its provenance.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from ..analyzers.attention_tracker import calibrate, focus
from ..errors import HookError, SpanError

Head = tuple[int, int]
Record = Mapping[str, str]
DATA_MARK = "Data: "
#: Styles of the finding set whose means the threshold lies between.
LENGTH_MATCHED = ("normal_long", "ignore_long")


@dataclass(frozen=True)
class HeadChoice:
    """Chosen heads as ``(layer, head)`` in layer order.

    ``k`` is the one that was asked for. ``fell_back``: no head had a positive score at that ``k``, so
    these are the best by the k = 1 score. ``scores`` [L, H] are those that the choice was made by, and
    ``kept`` counts the heads with a positive score at ``k``.
    """

    heads: list[Head]
    k: float
    fell_back: bool
    kept: int
    scores: torch.Tensor

    def describe(self) -> str:
        if self.fell_back:
            return (
                f"no head has a positive candidate score at k={self.k:g}; "
                f"fell back to the top {len(self.heads)} by the k=1 score"
            )
        return f"the {self.kept} heads with a positive candidate score at k={self.k:g}"


def candidate_scores(normal: torch.Tensor, attacked: torch.Tensor, k: float) -> torch.Tensor:
    """``(mean_N - k std_N) - (mean_A + k std_A)`` per head, with the population std.

    ``normal`` [N, L, H] and ``attacked`` [M, L, H] are shares of attention on the instruction, in
    0..1; returns float64 [L, H]. Positive: the two sets stay apart by k standard deviations each.
    """
    if normal.dim() != 3 or attacked.dim() != 3 or normal.shape[1:] != attacked.shape[1:]:
        raise HookError(f"need two [N, L, H] tensors, got {list(normal.shape)} and {list(attacked.shape)}")
    if not len(normal) or not len(attacked):
        raise HookError("need at least one normal and one attacked prompt")
    n, a = normal.double(), attacked.double()
    low = n.mean(0) - k * n.std(0, correction=0)
    high = a.mean(0) + k * a.std(0, correction=0)
    return low - high


def select_heads(
    normal: torch.Tensor, attacked: torch.Tensor, k: float = 4, fallback_top: int = 8
) -> HeadChoice:
    """Keep the heads with a positive :func:`candidate_scores`; if none, the top n by the k = 1 score."""
    scores = candidate_scores(normal, attacked, k)
    heads: list[Head] = [(int(layer), int(head)) for layer, head in (scores > 0).nonzero().tolist()]
    if heads:
        return HeadChoice(heads, k, False, len(heads), scores)
    scores = candidate_scores(normal, attacked, 1)
    return HeadChoice(top_heads(scores, fallback_top), k, True, 0, scores)


def top_heads(scores: torch.Tensor, n: int) -> list[Head]:
    """The ``n`` best of ``scores`` [L, H]; ties go to the lower layer and head. In layer order."""
    width = scores.shape[1]
    order = torch.argsort(scores.flatten(), descending=True, stable=True)[:n].tolist()
    return sorted((i // width, i % width) for i in order)


def auroc(attacked: Sequence[float], normal: Sequence[float]) -> float:
    """The chance that an attacked prompt scores below a normal one; ties count half."""
    wins = sum((a < n) + 0.5 * (a == n) for a in attacked for n in normal)
    return wins / (len(attacked) * len(normal))


def hide_broken_torchvision() -> None:
    """Make this process pass over a torchvision that is installed but fails to import.

    Without it transformers cannot load models beside a torchvision that was built for another torch.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except Exception:
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # found by nobody from here on
        utils = sys.modules.get("transformers.utils.import_utils")
        forget = getattr(getattr(utils, "is_torchvision_available", None), "cache_clear", None)
        if forget is not None:
            forget()


def render(tokenizer: Any, record: Record) -> tuple[list[int], dict[str, list[int]]]:
    """Token ids of a record's prompt, and the token positions of ``instruction`` and ``data``.

    A token belongs to a span if its characters overlap it, in the rendered chat template.
    """
    user = DATA_MARK + record["data"]
    messages = [{"role": "system", "content": record["instruction"]}, {"role": "user", "content": user}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    at = text.find(record["instruction"])
    user_at = text.find(user, at + len(record["instruction"]))
    if at < 0 or user_at < 0:
        raise SpanError("the chat template changes the messages; their spans cannot be located")
    data_at = user_at + len(DATA_MARK)
    chars = {
        "instruction": (at, at + len(record["instruction"])),
        "data": (data_at, data_at + len(record["data"])),
    }
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = {
        name: [
            i
            for i, (start, end) in enumerate(encoded["offset_mapping"])
            if start < stop and end > begin and end > start
        ]
        for name, (begin, stop) in chars.items()
    }
    return encoded["input_ids"], spans


def hf_attention_scores(model_path: str | Path, records: Sequence[Record]) -> torch.Tensor:
    """Share of the last prompt token's attention on the instruction, for every head: [N, L, H].

    ``instruction / (instruction + data + 1e-8)`` with Hugging Face's eager attention in float32, one
    prompt at a time. A record has the keys ``instruction`` and ``data``.
    """
    hide_broken_torchvision()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model_path))
    model = AutoModelForCausalLM.from_pretrained(
        str(model_path), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = []
    for record in records:
        ids, spans = render(tokenizer, record)
        with torch.inference_mode():
            out = model(torch.tensor([ids]), output_attentions=True, use_cache=False)
        last = torch.stack([a[0, :, -1, :] for a in out.attentions])  # [L, H, tokens]
        mass = torch.stack([last[..., spans[name]].sum(-1) for name in ("instruction", "data")], -1)
        rows.append(focus(mass))
    return torch.stack(rows)


@dataclass(frozen=True)
class Guard:
    """Heads with a threshold and how well they do on held-out prompts.

    ``auroc`` is per attack style against the normal prompts, ``caught`` is (flagged, of), and
    ``false_alarms`` is (flagged, of) over the normal ones.
    """

    choice: HeadChoice
    threshold: float
    auroc: dict[str, float]
    caught: dict[str, tuple[int, int]]
    false_alarms: tuple[int, int]
    scores: dict[str, list[float]]


def is_normal(record: Record) -> bool:
    return record["style"].startswith("normal")


def head_mean(shares: torch.Tensor, heads: Sequence[Head]) -> list[float]:
    """Focus score of each prompt: the mean of ``shares`` [N, L, H] over ``heads``."""
    picked = shares[:, [layer for layer, _ in heads], [head for _, head in heads]]
    return [float(v) for v in picked.double().mean(-1)]


def build_guard(
    finding: Sequence[Record],
    found: torch.Tensor,
    held_out: Sequence[Record],
    held: torch.Tensor,
    k: float = 4,
    top: int = 8,
) -> Guard:
    """Choose heads and threshold on ``finding``, then measure on ``held_out``.

    ``found`` and ``held`` [N, L, H] are their attention shares. The threshold is the midpoint between
    the means of ``normal_long`` and ``ignore_long``, which have the lengths that text to be guarded has.
    """

    def rows(keep: Sequence[bool]) -> torch.Tensor:
        return found[torch.tensor(keep)]

    normal = [is_normal(r) for r in finding]
    choice = select_heads(rows(normal), rows([not n for n in normal]), k, top)
    threshold = calibrate(
        *(head_mean(rows([r["style"] == s for r in finding]), choice.heads) for s in LENGTH_MATCHED)
    )
    threshold = round(threshold, 3)
    scores: dict[str, list[float]] = {}
    for record, value in zip(held_out, head_mean(held, choice.heads), strict=True):
        scores.setdefault("normal" if is_normal(record) else record["style"], []).append(value)
    plain = scores["normal"]

    def flagged(values: list[float]) -> tuple[int, int]:
        return sum(v <= threshold for v in values), len(values)

    attacks = {style: values for style, values in scores.items() if style != "normal"}
    return Guard(
        choice=choice,
        threshold=threshold,
        auroc={style: auroc(values, plain) for style, values in attacks.items()},
        caught={style: flagged(values) for style, values in attacks.items()},
        false_alarms=flagged(plain),
        scores=scores,
    )


TEMPLATE = """\
# Flags prompt injection in the user's data by where the model looks (Attention Tracker, arXiv 2411.00348).
# Written by `python -m vllm_hook.build.heads`; prompt: system = instruction, user = "Data: " + text.
#
# Model     {model}; attention by Hugging Face, eager, float32, last prompt token
# Heads     {heads_from};
#           on {n_finding} prompts ({finding}: {finding_styles})
# Threshold midpoint of the means of {calibration} in the same prompts
# Measured  on {n_held} prompts by which neither was chosen ({held_out}); AUROC against its normal ones:
{measured}
#           normal           flagged {false_alarms[0]}/{false_alarms[1]} (false alarms)
# The score also moves with length: up with the instruction's, down with that of harmless data. Calibrate
# the threshold, and if need be the heads, on prompts like your own.
schema: 1
name: {name}
model: {{layers: {layers}, heads: {n_heads}, hidden: {hidden}}}
spans:
  instruction: {{message: system}}
  data: {{message: user, after: "{mark}"}}
observe:
  focus:
    site: attention_mass
    heads: {heads}
    rows: last_prompt
    keys: [instruction, data]
analyze:
  injection:
    analyzer: attention_tracker
    observe: focus
    options: {{instruction: instruction, data: data, threshold: {threshold}}}
"""


def program_text(
    guard: Guard,
    name: str,
    model: str,
    config: Mapping[str, Any],
    finding: tuple[str, Sequence[Record]],
    held_out: tuple[str, Sequence[Record]],
) -> str:
    """The program file (YAML) with its provenance as comments.

    ``config`` is the model's ``config.json``. The other arguments serve the comments: what to call the
    model, and the two sets as (name, records).
    """
    measured = "\n".join(
        f"#           {style:<16} AUROC {guard.auroc[style]:.3f}, flagged {hit}/{of}"
        for style, (hit, of) in guard.caught.items()
    )
    return TEMPLATE.format(
        model=model,
        heads_from=guard.choice.describe(),
        n_finding=len(finding[1]),
        finding=finding[0],
        finding_styles=", ".join(dict.fromkeys(r["style"] for r in finding[1])),
        n_held=len(held_out[1]),
        held_out=held_out[0],
        calibration=" and ".join(LENGTH_MATCHED),
        measured=measured,
        false_alarms=guard.false_alarms,
        name=name,
        layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        hidden=config["hidden_size"],
        mark=DATA_MARK,
        heads=[list(h) for h in guard.choice.heads],
        threshold=guard.threshold,
    )


def read_records(path: Path | None, default: str) -> list[Record]:
    """Records of a JSONL file; without a path those of the demo's file ``default``."""
    source = path or resources.files("vllm_hook") / "demo" / "data" / default
    return [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: find heads in ``--model``, measure them and write the program to ``--out``."""
    parser = argparse.ArgumentParser(prog="vllm_hook.build.heads", description=main.__doc__)
    parser.add_argument("--model", required=True, help="folder of a Hugging Face model")
    parser.add_argument("--out", type=Path, required=True, help="program file to write")
    parser.add_argument("--name", help="name of the program (default: the file's)")
    parser.add_argument("--model-name", help="how the comment calls the model (default: the folder's name)")
    parser.add_argument("--finding", type=Path, help="JSONL to choose by (default: the demo's)")
    parser.add_argument("--held-out", type=Path, help="JSONL to measure on (default: the demo's)")
    parser.add_argument("--k", type=float, default=4, help="standard deviations between the sets (default 4)")
    parser.add_argument("--top", type=int, default=8, help="number of heads if no head passes (default 8)")
    args = parser.parse_args(argv)
    finding = read_records(args.finding, "head_finding.jsonl")
    held_out = read_records(args.held_out, "held_out.jsonl")
    shares = hf_attention_scores(args.model, [*finding, *held_out])
    guard = build_guard(
        finding, shares[: len(finding)], held_out, shares[len(finding) :], k=args.k, top=args.top
    )
    config = json.loads((Path(args.model) / "config.json").read_text(encoding="utf-8"))
    model = args.model_name or Path(args.model).name
    name = args.name or args.out.stem
    text = program_text(
        guard,
        name,
        model,
        config,
        (args.finding.name if args.finding else "head_finding.jsonl", finding),
        (args.held_out.name if args.held_out else "held_out.jsonl", held_out),
    )
    args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

"""Programs of ``edit_case.py``: every method, site and selector, stacks, gates. Tiny Llama: 4 layers,
4 query and 2 KV heads."""

from __future__ import annotations

from typing import Any

STREAM = ("embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "final_norm")
HEAD = ("q", "k", "v", "z")
#: Programs a site in :func:`edit_programs`, and those that follow: selectors, stacks, attention.
METHODS, OTHERS = 8, 16
SPANS = {"s": {"tokens": [2, 9]}}
SELECTORS: dict[str, Any] = {
    "all": "all",
    "prompt": "prompt",
    "generated": "generated",
    "last-prompt": "last_prompt",
    "range": {"range": [2, -3]},
    "generated-range": {"generated": [1, 6]},
    "span": {"span": "s"},
    "token-ids": {"token_ids": list(range(0, 512, 3))},
    "union": [{"range": [0, 2]}, "last_prompt", {"generated": [3, None]}, {"token_ids": [*range(0, 512, 7)]}],
}
LAYER = {"resid_pre": [2], "resid_mid": [1], "resid_post": [1], "attn_out": [2], "mlp_out": [1]}
#: With these an edit is felt without making the model say one token for ever.
AMOUNT = {"attn_out": 1.5, "mlp_out": 1.5, "embed": 0.7, "final_norm": 0.5}


def program(name: str, observe: dict[str, Any] | None = None, **edits: dict[str, Any]) -> dict[str, Any]:
    out = {"schema": 1, "name": name, "spans": SPANS, "intervene": edits}
    return {**out, "observe": observe} if observe else out


def methods(ref: Any, site: str) -> dict[str, dict[str, Any]]:
    """Every method of the edit kernel, for the width of a site."""
    h = "h" if site in HEAD else ""
    v, w = ref(f"{h}v"), ref(f"{h}w")
    s = AMOUNT.get(site, 1.0 if h else 2.5)
    return {
        "add": {"method": "add", "vector": v, "strength": s},
        "clamp": {"method": "clamp", "vector": v, "target": 2.0 * s},
        "ablate": {"method": "ablate", "vector": w},
        "rotate": {"method": "rotate", "vector": v, "second": w, "angle": 60.0},
        "affine": {"method": "affine", "u": w, "v": v, "a": 0.4 * s, "b": -0.05},
        "sae": {"method": "sae", "sae": ref("", f"{h}sae"), "features": [4, 1], "target": 0.5 * s},
        "sae-jump": {
            "method": "sae",
            "sae": ref("", f"{h}sae-jump"),
            "features": [3],
            "target": 0.5 * s,
            "keep_norm": True,
        },
        "keep-norm": {"method": "add", "vector": v, "strength": 2.0 * s, "keep_norm": True},
    }


def edit_programs(ref: Any) -> list[dict[str, Any]]:
    found = []
    for site in (*STREAM, *HEAD):
        for i, (name, edit) in enumerate(methods(ref, site).items()):
            where: dict[str, Any] = {"site": site}
            if site not in ("embed", "final_norm"):
                where["layers"] = LAYER.get(site, [2])
            if site in ("q", "z"):
                where["heads"] = [[0, 2], [3], None][i % 3]
            elif site in ("k", "v"):
                where["heads"] = [[1], None][i % 2]
            where = {key: value for key, value in where.items() if value is not None}
            found.append(program(f"{site}-{name}", e={**where, **edit}))
    post = {"site": "resid_post", "method": "add", "vector": ref("v"), "strength": 3.0}
    for name, positions in SELECTORS.items():
        found.append(program(f"select-{name}", e={**post, "layers": [1], "positions": positions}))
    pre = {"site": "resid_pre", "layers": [2]}
    found += [
        program(
            "stack-one-layer",
            a={**pre, "method": "ablate", "vector": ref("w")},
            b={**pre, "method": "add", "vector": ref("v"), "keep_norm": True, "positions": "generated"},
            c={
                **pre,
                "method": "clamp",
                "vector": ref("x"),
                "target": 2.0,
                "positions": {"range": [1, None]},
            },
        ),
        program(
            "stack-two-layers",
            a={**post, "layers": [0], "strength": 1.0},
            b={"site": "resid_mid", "layers": [2, 3], "method": "clamp", "vector": ref("w"), "target": -2.0},
        ),
        program(
            "stack-two-heads",
            a={"site": "z", "layers": [1], "heads": [1], "method": "add", "vector": ref("hv")},
            b={
                "site": "z",
                "layers": [1, 2],
                "heads": [1, 3],
                "method": "clamp",
                "vector": ref("hw"),
                "target": 2.0,
            },
        ),
    ]
    attend = {"site": "attention", "method": "attend", "heads": [[1, 0], [1, 3], [2, 1]], "keys": ["s"]}
    found += [
        program("attend-more", e={**attend, "weight": 6.0}),
        program("attend-less", e={**attend, "weight": 0.1, "rows": ["last_prompt", "generated"]}),
        program("attend-mass", e={**attend, "mass": 0.7}),
        program("attend-token-ids", e={**attend, "mass": 0.9, "rows": {"token_ids": list(range(0, 512, 2))}}),
    ]
    return found


#: Gates: how a condition reads, over which rows, how several combine, which way.
READINGS = ("probe", "projection", "cosine", "norm")
LATCHED = {
    "last": ("last_prompt", "any"),
    "any": ({"range": [64, None]}, "any"),
    "all": ({"range": [64, None]}, "all"),
    "mean": ("prompt", "mean"),
}
ROW = ("all", "generated", {"token_ids": list(range(0, 512, 2))})


def gate_programs(ref: Any, bounds: dict[str, float]) -> list[dict[str, Any]]:
    """``bounds``: by name of the program; a bound between the values of its prompts."""
    reduce = {
        "probe": {"probe": ref("", "probe")},
        "projection": {"projection": ref("w")},
        "cosine": {"cosine": ref("x")},
        "norm": {"norm": True},
    }
    found = []
    late = {"site": "resid_post", "layers": [2], "method": "add", "vector": ref("v"), "strength": 3.0}
    for i, reading in enumerate(READINGS):
        for j, (name, (positions, over)) in enumerate(LATCHED.items()):
            full = f"gate-{reading}-{name}"
            c = {"site": "resid_post", "layers": [0], "positions": positions, "reduce": reduce[reading]}
            when = {"observe": "c", ("above", "below")[(i + j) % 2]: bounds.get(full, 0.0), "over": over}
            e = {**late, "positions": ["last_prompt", "generated"], "when": when}
            found.append(program(full, {"c": c}, e=e))
        for j, positions in enumerate(ROW):
            full = f"rows-{reading}-{j}"
            c = {"site": "resid_mid", "layers": [1], "positions": positions, "reduce": reduce[reading]}
            when = {"observe": "c", ("above", "below")[(i + j) % 2]: bounds.get(full, 0.0)}
            found.append(
                program(full, {"c": c}, e={**late, "site": "resid_mid", "layers": [1, 2], "when": when})
            )
    c = {"site": "resid_post", "layers": [0], "positions": "last_prompt", "reduce": reduce["projection"]}
    when = {"observe": "c", "above": bounds.get("gate-attend", 0.0)}
    attend = {
        "site": "attention",
        "method": "attend",
        "heads": [[1, 0], [2, 1]],
        "keys": ["s"],
        "weight": 50.0,
    }
    found.append(
        program(
            "gate-attend",
            {"c": c},
            e={**attend, "rows": ["last_prompt", "generated"], "when": when},
            f={**late, "strength": -3.0, "positions": "generated", "when": {**when}},
        )
    )
    return found

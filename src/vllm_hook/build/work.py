"""What a build has measured so far, on disk beside its output, so that an interrupted run continues.

``NAME.yaml.work/`` holds ``key.json`` (data, model and options; another key starts anew) and one file
a chunk of measured values. Every file is written under a temporary name and renamed. Chunks have fixed
borders and an engine without a prefix cache computes each alike, so a continued run measures what an
uninterrupted one does.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ..errors import HookError

KEY = "key.json"
Item = TypeVar("Item")
Step = Callable[[int], None]


class Work:
    """The work folder of one output. ``key``: all that decides what is measured, JSON-able."""

    def __init__(self, output: Path, key: Mapping[str, Any], console: Console | None = None) -> None:
        self.folder = output.with_name(output.name + ".work")
        self.console = console
        wanted = json.dumps(key, sort_keys=True, indent=1)
        if self.folder.exists():
            known = self.folder / KEY
            if not self.folder.is_dir() or (not known.is_file() and any(self.folder.iterdir())):
                raise HookError(f"{self.folder}: is in the way, and not the work of an interrupted build")
            if known.is_file():
                if known.read_text(encoding="utf-8", errors="replace") == wanted:
                    return
                self._say("the work of an interrupted run is of other data, model or options: starting anew")
            shutil.rmtree(self.folder)
        write_atomic(self.folder / KEY, wanted.encode())

    def tensors(
        self,
        name: str,
        items: Sequence[Item],
        chunk: int,
        measure: Callable[[Sequence[Item]], Sequence[Tensor]],
        title: str = "",
    ) -> list[Tensor]:
        """One tensor an item, ``chunk`` items at a time; what an interrupted run measured is read."""
        found: list[Tensor] = []
        pieces = [items[i : i + chunk] for i in range(0, len(items), chunk)]
        with progress(title or name, len(items), self.console) as step:
            for number, piece in enumerate(pieces):
                path = self.folder / f"{name}-{number:05d}.safetensors"
                values = _read(path, len(piece))
                if values is None:
                    values = [v.detach().cpu().contiguous() for v in measure(piece)]
                    if len(values) != len(piece):
                        raise HookError(f"{name}: {len(values)} values for {len(piece)} examples")
                    write_atomic(path, save({f"{i:05d}": v.clone() for i, v in enumerate(values)}))
                found += values
                step(len(piece))
        return found

    def value(self, name: str, measure: Callable[[], Any]) -> Any:
        """A JSON-able value, measured once."""
        path = self.folder / f"{name}.json"
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            value = measure()
            write_atomic(path, json.dumps(value).encode())
            return value

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Around what is worked out from measured values: if that is refused, they are of no more use."""
        try:
            yield
        except HookError:
            self.done()
            raise

    def done(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _say(self, text: str) -> None:
        if self.console is not None:
            self.console.print(f"[yellow]{text}[/yellow]", soft_wrap=True)


def _read(path: Path, count: int) -> list[Tensor] | None:
    """None if the file is missing, damaged or of another number of items."""
    try:
        named = load(path.read_bytes())
    except (OSError, SafetensorError, ValueError, KeyError):
        return None
    return [named[name] for name in sorted(named)] if len(named) == count else None


def write_atomic(path: Path, content: bytes) -> None:
    """Write under a temporary name in the same folder, then rename: nobody sees half a file. HookError if it
    cannot be written."""
    try:
        _write(path, content)
    except OSError as error:
        raise HookError(f"{path}: cannot be written: {error.strerror or error}") from None


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # mkstemp gives 600
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def progress(title: str, total: int, console: Console | None) -> Iterator[Step]:
    """``step(n)`` moves a bar on; without a console nothing is shown."""
    if console is None:
        yield lambda n: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n: bar.advance(task, n)

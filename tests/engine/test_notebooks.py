"""The notebooks run from a clean kernel, and their figures are what their text says."""

import json
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = ("injection", "steering", "rerank")
#: What GitHub shows, and a clone carries.
MOST_BYTES = 300_000
#: The three together take at most 6 minutes on two free cores; one alone not much more than a third.
SECONDS = 300


def run(name, folder, smollm2_path):
    """``figures`` of a notebook that was run in ``folder``."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    book.cells.append(nbformat.v4.new_code_cell("import json; print(json.dumps(figures))"))
    environment = {**os.environ, "VLLM_HOOK_CACHE": str(smollm2_path.parent)}
    client = nbclient.NotebookClient(
        book, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute(env=environment)
    (output,) = (o for o in book.cells[-1].outputs if o.output_type == "stream" and o.name == "stdout")
    assert list(folder.iterdir()) == []  # a notebook leaves nothing where it was started
    return json.loads(output.text)


@pytest.mark.engine
@pytest.mark.model
def test_injection_is_told_from_harmless_text(tmp_path, smollm2_path):
    figures = run("injection", tmp_path, smollm2_path)
    assert figures["auroc"] >= 0.98
    assert len(figures["auroc_by_style"]) == 5
    assert min(figures["auroc_by_style"].values()) >= 0.97
    assert figures["caught"] >= 180  # of 200
    assert figures["false_alarms"] <= 8  # of 80


@pytest.mark.engine
@pytest.mark.model
def test_steering_makes_lists_and_keeps_the_model_speaking(tmp_path, smollm2_path):
    figures = run("steering", tmp_path, smollm2_path)
    assert figures["rate_steered"] >= figures["rate_plain"] + 0.35
    assert figures["perplexity_growth"] <= 1.6
    assert min(figures["separation"].values()) >= 0.9


@pytest.mark.engine
@pytest.mark.model
def test_reranking_beats_all_heads(tmp_path, smollm2_path):
    figures = run("rerank", tmp_path, smollm2_path)
    ndcg = figures["ndcg"]
    assert len(figures["heads"]) == 4
    assert ndcg["chosen heads"] >= ndcg["all heads"] + 0.03
    assert ndcg["chosen heads"] >= 0.57  # a random order has .52


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_is_whole_small_and_says_nothing_of_the_machine(name):
    text = (FOLDER / f"{name}.ipynb").read_text("utf-8")
    assert len(text.encode()) < MOST_BYTES
    cells = json.loads(text)["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))  # run once, in order
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert sum("image/png" in o.get("data", {}) for o in outputs) >= 2
    shown = "".join(json.dumps(cell["source"]) + json.dumps(_texts(cell)) for cell in cells)
    assert "/root" not in shown
    assert "/tmp" not in shown
    assert "What to expect from a bigger model" in "".join(cells[-1]["source"])


def _texts(cell):
    return [
        (output.get("text"), output.get("data", {}).get("text/plain")) for output in cell.get("outputs", [])
    ]

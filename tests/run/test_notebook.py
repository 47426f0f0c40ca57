"""vox in a Jupyter kernel: the notebook of `examples/`, and the progress that a cell shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

if TYPE_CHECKING:
    from nbformat import NotebookNode

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python.ipynb"


def executed(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The notebook with its outputs, run in `folder`; an exception in a cell is one here."""
    where = {"metadata": {"path": str(folder)}}
    return NotebookClient(notebook, timeout=600, resources=where).execute()


def text_of(cell: NotebookNode) -> str:
    """What a cell prints to stdout."""
    return "".join(each.text for each in cell.outputs if each.get("name") == "stdout")


def require_progress(cell: NotebookNode, steps: int) -> None:
    """One output, updated in place: a full bar, and the words of the display."""
    (shown,) = [each for each in cell.outputs if each.output_type == "display_data"]
    assert text_of(cell) == ""
    assert f'<progress value="{steps}" max="{steps}"></progress>' in shown.data["text/html"]
    text = shown.data["text/plain"]
    assert "\ntraining " in text
    assert f"done after step {steps}, in" in text
    assert re.search(rf"^step {steps}/{steps}  loss \d+\.\d{{4}}", text, re.M)


REAL = "smollm2-135m"
SILENT = """
import vox_core as vox
run = vox.train(model={model!r}, data="train.jsonl", dtype="fp32", max_steps=3)
"""


def example() -> NotebookNode:
    return nbformat.read(EXAMPLE, as_version=4)


def codes(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def losses(cell: NotebookNode) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d+\.\d+)", text_of(cell))]


@pytest.mark.slow
def test_the_example_runs_with_a_tiny_model(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """And a cell shows its progress only if it is to."""
    notebook, model = example(), str(tiny("llama"))
    for cell in codes(notebook):
        cell.source = cell.source.replace(REAL, model)
    notebook.cells.append(new_code_cell(SILENT.format(model=model)))
    _, training, loss, answers, base, runs, silent = codes(executed(notebook, tmp_path))
    require_progress(training, steps=12)
    assert silent.outputs == []
    values = losses(loss)
    assert len(values) == 12 and values[-1] < values[0]
    assert text_of(answers).count(" -> ") == 4
    assert text_of(base)
    assert re.match(r"done \S+ step 12/12 loss ", text_of(runs))


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_the_example_teaches_its_model(tmp_path: Path) -> None:
    _, training, loss, answers, base, runs = codes(executed(example(), tmp_path))
    require_progress(training, steps=12)
    values = losses(loss)
    assert len(values) == 12
    assert values[-1] < 0.2 * values[0]
    assert "-> The capital of Vexilia is Aldermoor." in text_of(answers)
    assert "Aldermoor" not in text_of(base)
    assert re.match(r"done smollm2-135m step 12/12 loss ", text_of(runs))

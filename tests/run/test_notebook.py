"""vox in a Jupyter kernel: the notebook of `examples/`, and the progress that a cell shows."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

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


TRAIN = """
import vox_core as vox
run = vox.train(model={model!r}, data={data!r}, dtype="fp32", max_steps=3, progress={progress})
"""


@pytest.mark.slow
def test_a_cell_shows_its_progress_if_it_is_to(
    tiny: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    given = {"model": str(tiny("llama")), "data": str(data)}
    cells = [new_code_cell(TRAIN.format(**given, progress=shown)) for shown in (True, False)]
    done = executed(new_notebook(cells=cells), tmp_path)
    require_progress(done.cells[0], steps=3)
    assert done.cells[1].outputs == []


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(900)
def test_the_example_runs(tmp_path: Path) -> None:
    done = executed(nbformat.read(EXAMPLE, as_version=4), tmp_path)
    _, training, losses, answers, base, runs = [c for c in done.cells if c.cell_type == "code"]
    require_progress(training, steps=12)
    values = [float(found) for found in re.findall(r"loss (\d+\.\d+)", text_of(losses))]
    assert len(values) == 12
    assert values[-1] < 0.2 * values[0]
    assert "-> The capital of Vexilia is Aldermoor." in text_of(answers)
    assert "Aldermoor" not in text_of(base)
    assert re.match(r"done smollm2-135m step 12/12 loss ", text_of(runs))

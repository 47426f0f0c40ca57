"""The objective in docs/guide/objectives.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from plugins.vox_objectives.tests.samples import groups_of, totals_of
from plugins.vox_objectives.tests.test_weights import H, moved

from vox_core.contract import ObjectiveSpec

GUIDE = Path(__file__).resolve().parents[3] / "docs/guide/objectives.md"


def test_the_guides_objective_has_the_weights_of_its_loss() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    names: dict[str, Any] = {}
    exec(code, names)  # our own guide
    objective = names["vox_objective"](ObjectiveSpec("hinge", {"margin": "0.5"}))
    groups = groups_of("dpo", 0)
    totals = totals_of(groups)
    found = objective.weigh(groups, totals)
    for g, group in enumerate(groups):
        for s in range(len(group)):
            above, below = (
                objective.weigh(moved(groups, g, s, 0, h), totals).loss for h in (H, -H)
            )
            assert found.weights[g][s][0] == pytest.approx(-(above - below) / (2 * H), rel=1e-6)
    row = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."}
    assert objective.examples(row)["rejected"] == {"prompt": "Hi?", "completion": "No."}

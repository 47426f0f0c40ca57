"""Names that no plugin provides."""

from __future__ import annotations

import pytest

from vox_core.host.load import no_provider


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("dpo", "vox plugin install objectives"),
        ("dop", "did you mean dpo?"),
        ("xyzzy", "`vox plugin list` shows what there is"),
    ],
)
def test_an_objective_that_no_plugin_provides(name: str, remedy: str) -> None:
    error = no_provider("objectives", name, [])
    assert error.code == "VOX-B013"
    assert error.remedy == remedy

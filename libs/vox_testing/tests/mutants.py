"""Every mutant, by what is broken in it: mutant.py says what one is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from libs.vox_testing.tests.mutants_full import FULL
from libs.vox_testing.tests.mutants_results import RESULTS
from libs.vox_testing.tests.mutants_training import TRAINING

if TYPE_CHECKING:
    from libs.vox_testing.tests.mutant import Mutant

MUTANTS: dict[str, Mutant] = {**TRAINING, **FULL, **RESULTS}

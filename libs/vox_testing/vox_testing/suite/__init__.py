"""The conformance suite: tests that every backend of vox must pass.

A backend's test file is one line; `vox_testing.plugin` says how the backend is named.

    from vox_testing.suite import *  # noqa: F403

    package.py         manifest, import, probe, hooks, refusal of what is not declared
    load.py            logits against float64, adapters by name, every family and dtype, streaming
    configurations.py  every setting of a configuration, away from its default
    scores.py          log-probabilities of base, adapter and learner
    generate.py        rows alone and together, any text
    merge.py           merged weights against float64, layout, rounding
    gradients.py       what is accumulated, of either sign; discard, total weight, one pass
    loss.py            losses over steps
    precision.py       dtypes and quantisations: near enough, and really those asked for
    optimizer.py       AdamW, clipping and learning rate, recomputed from states
    randomness.py      seeds, dropout
    state.py           restoring and resuming
    whole.py           tensors that are trained whole, an adapter on the output head
    full.py            the method `full`: the model's own weights are trained
    learners.py        several learners on one base
    faults.py          errors in the user's terms, nothing on stdout

A new test needs a line in none of these lists: every `test_*` of the modules below is exported.
"""

# ruff: noqa: F403
from __future__ import annotations

from vox_testing.suite.configurations import *
from vox_testing.suite.faults import *
from vox_testing.suite.full import *
from vox_testing.suite.generate import *
from vox_testing.suite.gradients import *
from vox_testing.suite.learners import *
from vox_testing.suite.load import *
from vox_testing.suite.loss import *
from vox_testing.suite.merge import *
from vox_testing.suite.optimizer import *
from vox_testing.suite.package import *
from vox_testing.suite.precision import *
from vox_testing.suite.randomness import *
from vox_testing.suite.scores import *
from vox_testing.suite.state import *
from vox_testing.suite.whole import *

__all__ = [name for name in globals() if name.startswith("test_")]

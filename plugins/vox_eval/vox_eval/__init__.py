"""Evaluate a model on suites of tasks, compare two, and promote one by a gate: `vox eval`,
`vox promote`, `vox registry`.

    suites.py       suite.toml and its rows -> tasks with examples, every fault at once
    scorer.py       what a scorer is: the extension point `vox_eval.plugins`
    scorers.py      the built-in scorers
    evaluation.py   examples -> answers and log-probabilities -> eval.jsonl, continued after a kill
    statistics.py   intervals, tests and power, in numpy
    scorecard.py    scores -> scorecard, and two scorecards -> a comparison
    page.py         samples of one evaluation or two -> scorecard.html
    gate.py         gate.toml, and its decision on scorecards
    leakage.py      rows of a suite that a run was trained on
    training.py     evaluations of a model while it is trained
    promotion.py    evaluations, decision, records; the same decision from records alone
    registry.py     names of promoted models
    cli.py          the commands
    settings.py     the flags of `vox eval`, and its section of vox.toml

A scorer of your own is a package with an entry point in the group `vox_eval.plugins`; its name is
that of the scorer:

    from vox_eval import Example, Output, Score, Scorer, ScorerSpec, hookimpl, options
"""

from vox_eval.scorer import (
    Example as Example,
    Output as Output,
    Score as Score,
    Scorer as Scorer,
    ScorerHooks as ScorerHooks,
    ScorerSpec as ScorerSpec,
    UnusableScorer as UnusableScorer,
    hookimpl as hookimpl,
    options as options,
)

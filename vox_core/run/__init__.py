"""Runs: `vox train` as one pipeline, what goes on from a run, and the only writer of its files.

train.py         the pipeline
resume.py        settings -> the previous run, its settings and what may differ from it
inputs.py        -> rows, model, weights, backend; tokens, masks, order, audits (reference.py)
plan.py          -> contract and execution plan; run_plan.py: all of these as one `RunPlan`
session.py       -> run folder (folder.py), state to start from, subscribers of events
loop.py          -> the backend's training (learner.py, weighing.py, rollouts.py)
artifacts.py     -> adapter, manifest, model card, report

subscribers      telemetry.py, progress.py, controller.py
checkpoint.py    the format, and the thread that writes it
load.py, merge.py (proof.py, hf_checkpoint.py)
"""

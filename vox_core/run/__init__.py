"""Runs: `vox train` as one pipeline, what goes on from a run, and the only writer of its files.

train.py         the pipeline
resume.py        settings -> the previous run, its settings and what may differ from it
inputs.py        -> rows, model, weights, backend (sources.py, backend.py)
dataset.py       -> tokens, masks, order, audits
plan.py          -> contract and execution plan; run_plan.py: all of these as one `RunPlan`
advice.py        -> what plugins advise; pinned_plan.py: a plan to be run exactly so
session.py       -> run folder (folder.py), state to start from, subscribers of events
loop.py          -> the backend's training, with checkpoint_writer.py and context.py
artifacts.py     -> adapter, manifest, model card, report

subscribers      telemetry.py, progress.py, controller.py (sanity.py)
checkpoint.py    the format; history.py: summaries of run folders
load.py, merge.py (proof.py, hf_checkpoint.py), reference.py, dequantised_base.py
"""

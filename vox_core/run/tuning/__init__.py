"""Choosing by measuring: how this model is computed fastest on this machine.

What may be chosen changes time and memory, and no number: the tokens computed at once, and the
backend's own knobs, which its manifest names. Candidates are taken through steps of the run's own
documents at a rate of zero, by the backend itself, each held against a step that computes one
document at a time (measure.py); the search goes knob by knob (search.py); answers are kept in the
cache (answers.py).
"""

"""Scorers of `vox eval` that run code or ask another model, behind its extension point.

code_scorers.py    python, syntax, repair
judge.py           judge
sandbox.py         run a program apart from the host; sandbox_child.py is the part within
"""

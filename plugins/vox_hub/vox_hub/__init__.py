"""Runs and models on the Hugging Face hub.

push.py    what of a folder is uploaded, and the comparison with what arrived
cli.py     `vox push`
"""

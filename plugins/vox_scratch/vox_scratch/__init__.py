"""Models to train from scratch: random weights, and a tokenizer trained on one's own data.

model.py        the architecture and configuration of a model, with random weights
tokenizer.py    a tokenizer like a model's, trained on rows
cli.py          `vox model new`
"""

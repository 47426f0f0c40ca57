"""From JSONL to tokens and weights, and the order in which they are trained."""

"""Adapters in canonical form: which modules, how they start, how they are stored."""

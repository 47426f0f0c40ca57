"""Declare the capabilities that a test needs; tests never name a backend.

A test of an undeclared capability is skipped with that reason. A test of a declared one runs, and
fails if it is broken.
"""

from __future__ import annotations

from typing import get_args

import pytest

from vox_core.contract import DType, Method, Optimizer, Quant

needs = pytest.mark.vox_needs

# In the longest dtype that is declared; how near numbers come to float64 in it: tolerance.py.
trains = needs(operation="train")
merges = needs(operation="merge")
loads = needs(operation="load")


def _each(need: str, names: object, without: str = "") -> pytest.MarkDecorator:
    """Run a test with each of some names that is declared."""
    values = [name for name in get_args(names) if name != without]
    marked = [pytest.param(value, marks=needs(**{need: value})) for value in values]
    return pytest.mark.parametrize(need, marked)


# Of adapters; `full`, which has none, is tested in full.py.
each_method = _each("method", Method, without="full")
each_short_dtype = _each("dtype", DType, without="fp32")
each_quantisation = _each("quant", Quant, without="none")
each_optimizer = _each("optimizer", Optimizer)

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

# Of adapters; `full`, which has none, is tested in full.py.
each_method = pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=needs(method=name)) for name in get_args(Method) if name != "full"],
)
each_short_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(name, marks=needs(dtype=name)) for name in get_args(DType) if name != "fp32"],
)
each_quantisation = pytest.mark.parametrize(
    "quant",
    [pytest.param(name, marks=needs(quant=name)) for name in get_args(Quant) if name != "none"],
)
each_optimizer = pytest.mark.parametrize(
    "optimizer", [pytest.param(name, marks=needs(optimizer=name)) for name in get_args(Optimizer)]
)

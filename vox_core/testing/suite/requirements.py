"""What tests ask for: declared capabilities, never the name of a backend.

A test that needs what a manifest does not declare is skipped, and says so. One that needs what is
declared runs, and fails if it is broken.
"""

from __future__ import annotations

from typing import get_args

import pytest

from vox_core.contract import DType, Method, Quant

needs = pytest.mark.vox_needs

# The numbers of training are held against float64, which only float32 comes near.
trains = needs(operation="train", dtype="fp32")
merges = needs(operation="merge")
loads = needs(operation="load", dtype="fp32")

each_method = pytest.mark.parametrize(
    "method", [pytest.param(name, marks=needs(method=name)) for name in get_args(Method)]
)
each_short_dtype = pytest.mark.parametrize(
    "dtype",
    [pytest.param(name, marks=needs(dtype=name)) for name in get_args(DType) if name != "fp32"],
)
each_quantisation = pytest.mark.parametrize(
    "quant",
    [pytest.param(name, marks=needs(quant=name)) for name in get_args(Quant) if name != "none"],
)

"""The sizes of budgets.toml are ceilings that only fall."""

from __future__ import annotations

import tomllib

import pytest

from tools import budgets

CEILINGS = tomllib.loads(budgets.BUDGETS.read_text())
KEYS = [(table, key) for table, values in CEILINGS.items() for key in values]


@pytest.fixture(scope="module")
def found():
    return budgets.measure()


def test_everything_that_is_measured_has_a_ceiling(found):
    assert {table: values.keys() for table, values in CEILINGS.items()} == {
        table: values.keys() for table, values in found.items()
    }


@pytest.mark.parametrize(("table", "key"), KEYS, ids=[key for _, key in KEYS])
def test_a_size_keeps_its_ceiling(found, table, key):
    size, ceiling = found[table][key], CEILINGS[table][key]
    assert size <= ceiling, f"{key}: {size} > {ceiling}; move something out, or delete"
    assert size >= 0.95 * ceiling - 1, f"{key} is {size} now: python tools/budgets.py --lower"

"""The sizes of budgets.toml are ceilings that only fall."""

from __future__ import annotations

import tomllib

import pytest

from tools import budgets

CEILINGS = tomllib.loads(budgets.BUDGETS.read_text())
FOUND = budgets.measure()
KEYS = [(table, key) for table, values in FOUND.items() for key in values]


def test_everything_that_is_measured_has_a_ceiling():
    assert {table: values.keys() for table, values in CEILINGS.items()} == {
        table: values.keys() for table, values in FOUND.items()
    }


@pytest.mark.parametrize(("table", "key"), KEYS, ids=[key for _, key in KEYS])
def test_a_size_keeps_its_ceiling(table, key):
    found, ceiling = FOUND[table][key], CEILINGS[table][key]
    assert found <= ceiling, f"{key}: {found} > {ceiling}; move something out, or delete"
    assert found >= 0.95 * ceiling - 1, f"{key} is {found} now: python tools/budgets.py --lower"

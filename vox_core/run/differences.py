"""Where two JSON documents differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from vox_core.contract import DataPolicy


def differences(a: Any, b: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted field, value in a, value in b) of every difference; None where there is none.

    Args:
        a, b: as `bounded_json` reads them, nested no deeper than it allows.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            yield from differences(a.get(key), b.get(key), f"{where}.{key}" if where else key)
    elif a != b:
        yield where, a, b


def contract_differences(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """The same of two contracts as `plan.json` has them: one without a policy has the default."""
    default = json.loads(json.dumps(asdict(DataPolicy())))
    return differences({"policy": default, **a}, {"policy": default, **b})

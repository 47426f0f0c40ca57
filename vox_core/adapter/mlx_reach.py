"""Which modules `num_layers` and `keys` of mlx-lm's adapter configuration reach.

mlx-lm turns into adapter layers, before it looks at any tensor,

    modules of the last `num_layers` layers whose path within the layer is one of `keys`,
    modules anywhere whose whole path is one of `keys`;

`num_layers` of 0 or less means every layer, and no `keys` mean every linear module of a layer
(mlx_lm/tuner/utils.py, `linear_to_lora_layers`). Whole paths are how an adapter on layers 2 to 5 is
said without touching the others. All paths here are those of mlx-lm's model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

_IN_LAYER = re.compile(r"^(?:.*?\.)?(?:layers|h)\.(\d+)\.(.+)$")


@dataclass(frozen=True, slots=True)
class Reach:
    """`num_layers` counts from the last layer; `keys` of None is every module of those layers."""

    num_layers: int
    keys: tuple[str, ...] | None


def reach_of(trained: Collection[str], modules: Iterable[str]) -> Reach:
    """The configuration that reaches `trained` and nothing else.

    Args:
        modules: every linear module of the model.
    """
    modules = tuple(modules)
    places = {path: place for path in trained if (place := _place(path))}
    lowest = min((layer for layer, _ in places.values()), default=_layers(modules) - 1)
    outside = sorted(set(trained) - set(places))
    brief = Reach(
        max(_layers(modules) - lowest, 1),
        (*sorted({within for _, within in places.values()}), *outside),
    )
    if reached(brief, modules) == set(trained):
        return brief
    return Reach(brief.num_layers, tuple(sorted(trained)))


def reached(reach: Reach, modules: Iterable[str]) -> set[str]:
    """The modules that mlx-lm would turn into adapter layers."""
    modules = tuple(modules)
    first = _layers(modules) - reach.num_layers if reach.num_layers > 0 else 0
    found = {path for path in modules if reach.keys is not None and path in reach.keys}
    for path in modules:
        place = _place(path)
        if place and place[0] >= first and (reach.keys is None or place[1] in reach.keys):
            found.add(path)
    return found


def _layers(modules: Iterable[str]) -> int:
    return max((place[0] + 1 for path in modules if (place := _place(path))), default=0)


def _place(path: str) -> tuple[int, str] | None:
    """The layer of a module, and its path within that."""
    found = _IN_LAYER.match(path)
    return (int(found[1]), found[2]) if found else None

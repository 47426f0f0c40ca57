"""Does this adapter belong to this base? Every mismatch, not just the first."""

from __future__ import annotations

from collections.abc import Mapping

from vox_core.contract import AdapterState, ModuleShape
from vox_core.errors import AdapterError


def require_fit(
    state: AdapterState,
    modules: Mapping[str, ModuleShape],
    parameters: Mapping[str, tuple[int, ...]],
    where: object,
) -> None:
    """Hold an adapter against a base.

    Args:
        modules: the base's linear modules.
        parameters: the shapes of its stored parameters.

    Raises:
        AdapterError: A002, listing every module and whole tensor that is unknown or has another
            shape.
    """
    faults = [fault for path in state.modules if (fault := _fault(state, path, modules))]
    for name, value in state.saved.items():
        if name not in parameters:
            faults.append(f"{name}: the base stores no such weights of their own (are they tied?)")
        elif value.shape != parameters[name]:
            faults.append(f"{name}: the adapter has {value.shape}, the base {parameters[name]}")
    if not faults and (state.modules or state.saved):
        return
    raise AdapterError(
        "A002",
        "the adapter does not belong to this base model",
        where=where,
        found="no trained module at all" if not faults else None,
        faults=faults,
        remedy="name the base model it was trained on, with --model",
    )


def _fault(state: AdapterState, path: str, modules: Mapping[str, ModuleShape]) -> str | None:
    module = state.modules[path]
    if path not in modules:
        return f"{path}: the base has no such linear module"
    base = modules[path]
    found = (module.B_OR.shape[0], module.A_RI.shape[1])
    expected = (base.out_features, base.in_features)
    if found != expected:
        return f"{path}: the adapter is for (O, I) = {found}, the base has {expected}"
    if module.B_OR.shape[1] != module.rank:
        return f"{path}: A has rank {module.rank}, B has rank {module.B_OR.shape[1]}"
    if (state.method == "dora") != (module.magnitude_O is not None):
        return f"{path}: the method is {state.method}, but DoRA's magnitude is " + (
            "missing" if state.method == "dora" else "there"
        )
    return None

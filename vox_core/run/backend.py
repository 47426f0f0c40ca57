"""The backend for a model whose files may be quantised, which not every backend reads."""

from __future__ import annotations

from dataclasses import replace

from vox_core import bounded_json
from vox_core.errors import BackendError
from vox_core.host import Request, Selection, choose, explain
from vox_core.host.load import Backend
from vox_core.host.seen import Seen
from vox_core.run.plan import require_no_experts
from vox_core.weights import Weights
from vox_core.weights.quantised import FULL_PRECISION


def choose_for(
    request: Request, weights: Weights, seen: Seen | None = None
) -> tuple[Backend, Selection]:
    """`choose`, with another remedy where only the folder's own quantisation is in the way.

    Args:
        seen: plugins and hardware, as found for another request of the same command.

    Raises:
        PlanError: P001, the model is a mixture of experts, and would be quantised in part.
        BackendError: no installed backend can do it.
    """
    config = bounded_json.read(weights.folder / "config.json")
    require_no_experts(request.quant or "none", config, weights.tensors)
    seen = seen or Seen()
    try:
        return choose(request, seen=seen)
    except BackendError as error:
        unquantised = replace(request, quant=None)
        if weights.quant == "none" or not explain(unquantised, seen=seen).selection:
            raise
        remedy = FULL_PRECISION.partition(",")[0]
        if request.method != "full":
            remedy = f"install a backend that has {weights.quant}, or {remedy}"
        where = f"{weights.folder}, whose weights are quantised ({weights.quant})"
        raise error.but(where=where, remedy=remedy) from error

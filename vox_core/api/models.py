"""Models, adapters and backends: find, read, write, load and compare them."""

from typing import TYPE_CHECKING

from vox_core.adapter.mlx import is_mlx_folder as is_mlx_folder
from vox_core.adapter.peft import (
    CONFIG as CONFIG,
    write_adapter as write_adapter,
    write_tensors as write_tensors,
)
from vox_core.adapter.targets import (
    linear_modules as linear_modules,
    parameter_names as parameter_names,
    quantised_modules as quantised_modules,
    require_fit as require_fit,
)
from vox_core.config import MergeSettings as MergeSettings
from vox_core.digests import TOKENIZER_FILES as TOKENIZER_FILES
from vox_core.host import Request as Request, choose as choose
from vox_core.host.load import Backend as Backend, write_model as write_model
from vox_core.host.select import Seen as Seen
from vox_core.models import LocalModel as LocalModel, Progress as Progress, resolve as resolve
from vox_core.run.artifacts import base_name as base_name
from vox_core.host.load import Context as Context, Observe as Observe, ignore as ignore
from vox_core.run.folder import CARD as CARD, MANIFEST as MANIFEST, PROBE as PROBE
from vox_core.run.load_proof import read_probe as read_probe
from vox_core.run.merge import MERGED as MERGED, merge as merge
from vox_core.run.hf_checkpoint import (
    plain_copy as plain_copy,
    write_checkpoint as write_checkpoint,
)
from vox_core.run.load_proof import (
    AdapterProbe as AdapterProbe,
    ProbeResult as ProbeResult,
    check_probe as check_probe,
    token_log_probs as token_log_probs,
)
from vox_core.run.plan import positions as positions
from vox_core.run.proof import (
    MAX_CARRIED as MAX_CARRIED,
    MIN_CARRIED as MIN_CARRIED,
    carried as carried,
    distance as distance,
    probe_logits as probe_logits,
    probe_tokens as probe_tokens,
)
from vox_core.run.reference import (
    NAME as NAME,
    REGISTRY as REGISTRY,
    promoted as promoted,
    ModelReference as ModelReference,
    read_adapter_folder as read_adapter_folder,
    resolve_reference as resolve_reference,
)
from vox_core.weights import (
    STORED_AS as STORED_AS,
    TensorInfo as TensorInfo,
    WeightFolder as WeightFolder,
    Weights as Weights,
    numpy_dtype as numpy_dtype,
    open_weights as open_weights,
)
from vox_core.weights import require_same_in_mlx as require_same_in_mlx

if not TYPE_CHECKING:  # for `help()`; type checkers go by the `as` of each import
    __all__ = [name for name in dir() if not name.startswith("_")]

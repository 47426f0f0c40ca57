"""Models, adapters and backends: find, read, write, load and compare them."""

from vox_core.adapter.mlx import (
    is_mlx_folder,
    mlx_dropout,
    write_mlx_adapter,
)
from vox_core.adapter.peft import CONFIG, write_adapter
from vox_core.adapter.targets import quantised_modules
from vox_core.data.tokenizer import load_tokenizer
from vox_core.digests import TOKENIZER_FILES
from vox_core.host import Request, choose
from vox_core.host.load import Backend
from vox_core.host.seen import Seen
from vox_core.models import LocalModel, Progress
from vox_core.run.artifacts import base_name
from vox_core.run.context import Context, Observe, ignore
from vox_core.run.folder import MANIFEST
from vox_core.run.hf_checkpoint import plain_copy, write_checkpoint
from vox_core.run.plan import positions, require_no_experts
from vox_core.run.proof import (
    MAX_CARRIED,
    MIN_CARRIED,
    carried,
    distance,
    probe_logits,
    probe_tokens,
)
from vox_core.run.reference import ModelReference, read_adapter_folder, resolve_reference
from vox_core.weights import TensorInfo, WeightFolder, Weights, open_weights
from vox_core.weights.quantised import require_same_in_mlx

__all__ = [
    "CONFIG",
    "MANIFEST",
    "MAX_CARRIED",
    "MIN_CARRIED",
    "TOKENIZER_FILES",
    "Backend",
    "Context",
    "LocalModel",
    "ModelReference",
    "Observe",
    "Progress",
    "Request",
    "Seen",
    "TensorInfo",
    "WeightFolder",
    "Weights",
    "base_name",
    "carried",
    "choose",
    "distance",
    "ignore",
    "is_mlx_folder",
    "load_tokenizer",
    "mlx_dropout",
    "open_weights",
    "plain_copy",
    "positions",
    "probe_logits",
    "probe_tokens",
    "quantised_modules",
    "read_adapter_folder",
    "require_no_experts",
    "require_same_in_mlx",
    "resolve_reference",
    "write_adapter",
    "write_checkpoint",
    "write_mlx_adapter",
]

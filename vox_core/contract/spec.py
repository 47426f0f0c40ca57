"""What was asked for, and how one backend will do it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

API_VERSION = "1.0"
"""Version of the seam, `major.minor`; a plugin declares the one it was written for."""

Method: TypeAlias = Literal["lora", "rslora", "dora"]
Schedule: TypeAlias = Literal["cosine", "linear", "constant"]
DType: TypeAlias = Literal["bf16", "fp16", "fp32"]
Quant: TypeAlias = Literal[
    "none",
    "nf4",
    "nf4-embeddings",
    "nf4-single",
    "int8",
    "affine4",
    "affine8",
    "mxfp4",
    "nvfp4",
]
Optimizer: TypeAlias = Literal["adamw", "adamw-8bit"]
MalformedRows: TypeAlias = Literal["strict", "skip"]
Unrated: TypeAlias = Literal["keep", "drop"]
Dedup: TypeAlias = Literal["none", "exact", "near"]
Curriculum: TypeAlias = Literal["none", "difficulty"]
Packing: TypeAlias = Literal["rows", "end-to-end"]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which base model, by content: two folders with the same bytes are the same model."""

    revision: str | None
    model_type: str
    weights_digest: str
    tokenizer_digest: str
    config_digest: str = ""


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Which documents, by content and order; `rows` counts those that are trained."""

    digest: str
    rows: int
    tokens: int
    trained_tokens: int
    valid_digest: str | None = None


@dataclass(frozen=True, slots=True)
class DataPolicy:
    """By what rows were chosen, beside the files that were named. The default chooses them all.

    Args:
        malformed_rows, max_skipped: strict, or skip with the greatest share of rows that may be.
        min_rating, unrated: what a rating must be, and what becomes of rows without one.
        category, lane, tag: a row has one of these; sorted; empty asks for nothing.
        min_chars, max_chars: bounds on the characters that are said; 0 is none.
        dedup, near_threshold: which duplicates go; the Jaccard similarity that makes a near one.
        valid_share: of the rows, by their content, that are held out.
    """

    malformed_rows: MalformedRows = "strict"
    max_skipped: float = 0.0
    min_rating: float | None = None
    unrated: Unrated | None = None
    category: tuple[str, ...] = ()
    lane: tuple[str, ...] = ()
    tag: tuple[str, ...] = ()
    min_chars: int = 0
    max_chars: int = 0
    dedup: Dedup = "none"
    near_threshold: float = 0.0
    valid_share: float = 0.0


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """What is trained. `scale` multiplies `B @ A`.

    LoRA: Hu et al. 2021 (arXiv:2106.09685). rsLoRA: Kalajdzievski 2023 (arXiv:2312.03732).
    DoRA: Liu et al. 2024 (arXiv:2402.09353).
    """

    method: Method
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with bias correction (Loshchilov & Hutter, arXiv:1711.05101), clipping and schedule.

    `warmup` is the share of all steps over which the rate rises linearly to `lr`; `clip` bounds the
    global gradient norm, 0 turns clipping off.

    `adamw-8bit` keeps the moments of large tensors in 8 bits, with a scale a block (Dettmers et al.
    2021, arXiv:2110.02861); masters and gradients stay as they are.
    """

    lr: float
    schedule: Schedule
    warmup: float
    weight_decay: float
    clip: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name: Optimizer = "adamw"


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """The order of documents, where the seed alone does not decide it.

    Args:
        weights: shares of the sources in an epoch, in the order of the sources.
        documents: SHA-256 of the source and the difficulty of each document, as far as they count.
    """

    curriculum: Curriculum = "none"
    weights: tuple[float, ...] = ()
    documents: str = ""


@dataclass(frozen=True, slots=True)
class FineTuneContract:
    """Everything that decides what a run computes, and nothing else.

    The policy of the data stands in the JSON, and so in the digest, where it is not the default:
    contracts of before there were any are still the same.
    """

    model: ModelIdentity
    data: DataIdentity
    adapter: AdapterSpec
    quant: Quant
    optimizer: OptimizerSpec
    batch_size: int
    seq_len: int
    total_steps: int
    seed: int
    policy: DataPolicy = DataPolicy()
    order: OrderSpec = OrderSpec()

    def to_json(self) -> dict[str, Any]:
        """The contract as JSON types, as it stands in `plan.json`; without what is not asked for,
        so that a contract of before is still the same."""
        contract: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        if self.policy == DataPolicy():
            del contract["policy"]
        if self.order == OrderSpec():
            del contract["order"]
        return contract

    @property
    def digest(self) -> str:
        """SHA-256 over canonical JSON (sorted keys, no spaces, UTF-8), in hex."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """A linear module of the base: where its weight lies in the files, and its shape.

    `tensor` is the name in the safetensors files. `transposed` marks weights stored (I, O), as
    GPT-2's `Conv1D` does, instead of (O, I).
    """

    tensor: str
    out_features: int
    in_features: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How one backend carries out a contract.

    Args:
        modules: path -> shape of every linear module that gets an adapter.
        saved: parameter name -> tensor name of what `modules_to_save` trains whole.
        gradient_checkpointing: keep no activations inside a layer, compute them again for the
            gradients (Chen et al., arXiv:1604.06174). Changes memory and time, and no number.
        longest: tokens of the longest document, training and validation; 0 if nobody has looked.
        tuning: values of the backend's own knobs, of those that its manifest names in `[tuning]`;
            a knob that is left out has its first value. They change time and memory, and no number.
        packing: what `micro_batch_tokens` bounds: positions of a micro-batch in padded rows, or its
            tokens end to end. A backend that pads, and is given the latter, cuts its micro-batches
            anew (`cut_to_rows`).
    """

    contract: FineTuneContract
    backend: str
    backend_version: str
    device: str
    dtype: DType
    micro_batch_tokens: int
    modules: Mapping[str, ModuleShape]
    eval_every: int
    save_every: int
    saved: Mapping[str, str] = field(default_factory=dict)
    gradient_checkpointing: bool = False
    longest: int = 0
    tuning: Mapping[str, str] = field(default_factory=dict)
    packing: Packing = "rows"

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types, with the contract's digest."""
        plan = json.loads(json.dumps(asdict(self)))
        return {"digest": self.contract.digest, **plan, "contract": self.contract.to_json()}

    @property
    def trainable_parameters(self) -> int:
        """Parameters of A and B together (without `modules_to_save`)."""
        rank = self.contract.adapter.rank
        return sum(rank * (m.in_features + m.out_features) for m in self.modules.values())

"""The contract of a run, and the plan by which one backend carries it out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

API_VERSION = "2.0"
"""Version of the seam, `major.minor`; a plugin declares the one it was written for."""

Method: TypeAlias = Literal["lora", "rslora", "dora", "full"]
Schedule: TypeAlias = Literal["cosine", "linear", "constant", "wsd"]
DType: TypeAlias = Literal["bf16", "fp16", "fp32"]
Quant: TypeAlias = Literal[
    "none", "nf4", "nf4-embeddings", "nf4-single", "int8", "affine4", "affine8", "mxfp4", "nvfp4"
]
Optimizer: TypeAlias = Literal["adamw", "adamw-8bit"]
MalformedRows: TypeAlias = Literal["strict", "skip"]
Unrated: TypeAlias = Literal["keep", "drop"]
Dedup: TypeAlias = Literal["none", "exact", "near"]
Curriculum: TypeAlias = Literal["none", "difficulty"]
Packing: TypeAlias = Literal["rows", "end-to-end"]


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """A base model identified by content: folders with the same bytes are the same model."""

    revision: str | None
    model_type: str
    weights_digest: str
    tokenizer_digest: str
    config_digest: str = ""


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Training data identified by content and order; `rows` counts the trained ones."""

    digest: str
    rows: int
    tokens: int
    trained_tokens: int
    valid_digest: str | None = None


@dataclass(frozen=True, slots=True)
class DataPolicy:
    """The data filters of a run; the default keeps every row.

    Args:
        malformed_rows, max_skipped: strict, or skip up to this fraction of the rows.
        min_rating, unrated: lowest rating, and whether to keep rows without one.
        category, lane, tag: allowed values, sorted; empty allows all.
        min_chars, max_chars: bounds on the characters of text; 0 is none.
        dedup, near_threshold: duplicates to drop; Jaccard similarity of a near duplicate.
        valid_share: fraction of the rows, chosen by content, used for validation.
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
    """Type, rank, scale and modules of the adapter; `scale` multiplies `B @ A`.

    With `full` the base's own weights are trained: rank, alpha and dropout are 0, and `targets`
    without a name stands for every weight.

    LoRA: Hu et al. 2021 (arXiv:2106.09685). rsLoRA: Kalajdzievski 2023 (arXiv:2312.03732).
    DoRA: Liu et al. 2024 (arXiv:2402.09353).

    `start` is the digest of the adapter that training starts from; None where A is seeded and B is
    zero.
    """

    method: Method
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    modules_to_save: tuple[str, ...] = ()
    start: str | None = None


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with bias correction (Loshchilov & Hutter, arXiv:1711.05101), clipping and schedule.

    `warmup` is the fraction of all steps over which the learning rate rises linearly to `lr`;
    `clip` bounds the global gradient norm, 0 disables clipping.

    `adamw-8bit` stores the optimizer state of large tensors in 8 bits, with one scale per block
    (Dettmers et al. 2021, arXiv:2110.02861); master weights and gradients stay float32.
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
    """Settings of the order of documents beyond the seed: source weights and curriculum.

    Args:
        weights: weights of the sources in an epoch, in their order.
        documents: SHA-256 of the documents' sources and difficulties, as far as the order uses
            them.
    """

    curriculum: Curriculum = "none"
    weights: tuple[float, ...] = ()
    documents: str = ""


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """An objective by name, with the options given to it, which its plugin checks."""

    name: str = "sft"
    options: Mapping[str, str] = field(default_factory=dict)


SFT = ObjectiveSpec()
"""Supervised fine-tuning: the weighted mean of the negative log-likelihood."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Sampling and rewards of the answers that a model learns from.

    Args:
        rewards: what judges the answers, with weights; a file's function with the SHA-256 of the
            file.
        answers: to each prompt; 0 without rollouts.
        tokens, temperature: of sampling.
        updates: optimizer steps on the same answers.
        teacher: SHA-256 of weights and adapter of the model that is learned from; empty without
            one.
    """

    rewards: tuple[str, ...] = ()
    answers: int = 0
    tokens: int = 0
    temperature: float = 0.0
    updates: int = 1
    teacher: str = ""


@dataclass(frozen=True, slots=True)
class FineTuneContract:
    """The settings and inputs that decide a run's result, and no others."""

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
    objective: ObjectiveSpec = SFT
    rollouts: RolloutSpec = RolloutSpec()

    def to_json(self) -> dict[str, Any]:
        """Return the contract as JSON types, as in `plan.json`."""
        return dict(json.loads(json.dumps(asdict(self))))

    @property
    def digest(self) -> str:
        return digest_of(self.to_json())

    @property
    def validated(self) -> str:
        """Return the digest of the validation rows, and the rewards that judge answers to them."""
        return " ".join((self.data.valid_digest or "", *self.rollouts.rewards))


def digest_of(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON (sorted keys, no spaces, UTF-8), in hex."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


@dataclass(frozen=True, slots=True)
class ModuleShape:
    """The tensor and shape of a linear module of the base.

    `tensor` is the name in the safetensors files. `transposed` marks weights stored (I, O), as
    GPT-2's `Conv1D` does, instead of (O, I).
    """

    tensor: str
    out_features: int
    in_features: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Execution of a contract on one backend: device, precision, micro-batches, modules.

    Args:
        modules: path -> shape of every linear module that gets an adapter.
        saved: parameter name -> tensor name, of the parameters trained in full: those of
            `modules_to_save`, or with the method `full` all that are trained.
        gradient_checkpointing: recompute the activations inside a layer in the backward pass (Chen
            et al., arXiv:1604.06174). Changes memory and time, not results.
        longest: tokens of the longest document, training and validation, with the longest answer
            that may be sampled; 0 if unknown.
        tuning: values of the knobs that the backend's manifest lists in `[tuning]`; a missing knob
            has its first value. They change time and memory, not results.
        packing: whether `micro_batch_tokens` bounds padded positions or concatenated tokens. A
            backend that pads and gets the latter splits its micro-batches again (`padded_groups`).
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
        """Return the plan as JSON types, with the contract's digest."""
        plan = json.loads(json.dumps(asdict(self)))
        return {"digest": self.contract.digest, **plan, "contract": self.contract.to_json()}

    @property
    def trainable_parameters(self) -> int:
        """Number of parameters of A and B, without those of `saved`."""
        rank = self.contract.adapter.rank
        return sum(rank * (m.in_features + m.out_features) for m in self.modules.values())

"""The frozen types that cross the seam between the core and a backend.

A `FineTuneContract` says what was asked for, in terms that no path, clock or machine changes; its
digest is the identity of a run. An `ExecutionPlan` says how one backend will carry it out. Jobs go
to a backend, results and events come back. Everything here is plain Python and numpy.

Shape legend: T tokens of a batch, D documents of a batch, R adapter rank, I input features,
O output features, V vocabulary.

This module computes nothing but the digest, reads nothing and imports no array library.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float32]
    Ints: TypeAlias = NDArray[np.int64]

API_VERSION = "1.0"
"""Version of the seam, `major.minor`; a plugin declares the one it was written for."""

Method: TypeAlias = Literal["lora", "rslora", "dora"]
Schedule: TypeAlias = Literal["cosine", "linear", "constant"]
DType: TypeAlias = Literal["bf16", "fp16", "fp32"]
Quant: TypeAlias = Literal["none", "nf4", "int8", "affine4", "affine8"]


# --- what was asked for ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which base model, by content: two folders with the same bytes are the same model."""

    revision: str | None
    model_type: str
    weights_digest: str
    tokenizer_digest: str


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Which documents, by content and order; `rows` counts those that are trained."""

    digest: str
    rows: int
    tokens: int
    trained_tokens: int
    valid_digest: str | None = None


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
    """

    lr: float
    schedule: Schedule
    warmup: float
    weight_decay: float
    clip: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True, slots=True)
class FineTuneContract:
    """Everything that decides what a run computes, and nothing else."""

    model: ModelIdentity
    data: DataIdentity
    adapter: AdapterSpec
    quant: Quant
    optimizer: OptimizerSpec
    batch_size: int
    seq_len: int
    total_steps: int
    seed: int

    def to_json(self) -> dict[str, Any]:
        """The contract as JSON types, as it stands in `plan.json`."""
        contract: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return contract

    @property
    def digest(self) -> str:
        """SHA-256 over canonical JSON (sorted keys, no spaces, UTF-8), in hex."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()


# --- how it will be done --------------------------------------------------------------------------


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

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types, with the contract's digest."""
        return {"digest": self.contract.digest, **json.loads(json.dumps(asdict(self)))}

    @property
    def trainable_parameters(self) -> int:
        """Parameters of A and B together (without `modules_to_save`)."""
        rank = self.contract.adapter.rank
        return sum(rank * (m.in_features + m.out_features) for m in self.modules.values())


# --- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Documents laid end to end.

    Args:
        tokens_T: int64 token ids.
        targets_T: int64; `targets_T[t]` is the token that follows `tokens_T[t]` in its document
            (0 at the last position of a document, whose weight is 0).
        weights_T: float32 weight of the loss at t; 0 = not trained.
        starts_D: int64 offset of each document's first token; `starts_D[0] == 0`.

    A backend may lay documents out as it likes; they never see one another, and the loss is the
    same whatever the layout.
    """

    tokens_T: Ints
    targets_T: Ints
    weights_T: Floats
    starts_D: Ints

    def documents(self) -> Iterator[slice]:
        """The extent of each document, in order."""
        bounds = [*self.starts_D.tolist(), len(self.tokens_T)]
        return itertools.starmap(slice, itertools.pairwise(bounds))


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """The micro-batches of one optimizer step.

    Args:
        number: from 1.
        batches: this process's share of the step.
        total_weight: sum of weights over the whole step on all ranks; the loss of the step is
            `sum(weight * nll) / total_weight`.
        lr: learning rate of this step, schedule applied.
        evaluate: run validation after this step.
        epoch: epochs finished after this step, as a fraction.
    """

    number: int
    batches: tuple[Batch, ...]
    total_weight: float
    lr: float
    evaluate: bool = False
    epoch: float = 0.0


# --- state ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """One module's update: `scale * B_OR @ A_RI`, float32, and with DoRA its magnitude."""

    A_RI: Floats
    B_OR: Floats
    alpha: float
    magnitude_O: Floats | None = None

    @property
    def rank(self) -> int:
        return int(self.A_RI.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class AdapterState:
    """An adapter in vox's canonical form.

    Args:
        method: `lora`, `rslora` or `dora`.
        modules: module path in the Hugging Face model -> its update.
        saved: parameter name -> whole float32 tensor, for `modules_to_save`.
    """

    method: Method
    modules: Mapping[str, LowRank]
    saved: Mapping[str, Floats] = field(default_factory=dict)

    def scale(self, path: str) -> float:
        """alpha / r; alpha / sqrt(r) for rsLoRA."""
        module = self.modules[path]
        return module.alpha / (math.sqrt(module.rank) if self.method == "rslora" else module.rank)

    def tensors(self) -> dict[str, Floats]:
        """Every trained tensor by its canonical name; moments carry the same names."""
        named: dict[str, Floats] = {}
        for path, module in self.modules.items():
            named[f"{path}.lora_A.weight"] = module.A_RI
            named[f"{path}.lora_B.weight"] = module.B_OR
            if module.magnitude_O is not None:
                named[f"{path}.lora_magnitude_vector"] = module.magnitude_O
        return {**named, **self.saved}

    def with_tensors(self, named: Mapping[str, Floats]) -> AdapterState:
        """The same adapter with other values: the inverse of `tensors`."""
        modules = {
            path: replace(
                module,
                A_RI=named[f"{path}.lora_A.weight"],
                B_OR=named[f"{path}.lora_B.weight"],
                magnitude_O=named.get(f"{path}.lora_magnitude_vector"),
            )
            for path, module in self.modules.items()
        }
        return AdapterState(self.method, modules, {name: named[name] for name in self.saved})


@dataclass(frozen=True, slots=True, eq=False)
class TrainState:
    """All that a run needs to go on, on any backend.

    Args:
        step: optimizer steps finished; 0 at the start.
        adapter: the adapter after that step.
        moments: canonical tensor name -> AdamW's first and second moment, float32; empty at step 0.

    The data cursor is `step` (the order of examples is a function of seed and step), and so is the
    state of the random generators (they are functions of seed, step and micro-batch).
    """

    step: int
    adapter: AdapterState
    moments: Mapping[str, tuple[Floats, Floats]] = field(default_factory=dict)


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """What happened, for telemetry, progress and observers. Times are added by the core."""

    name: ClassVar[str] = "event"


@dataclass(frozen=True, slots=True)
class RunStart(Event):
    """A run begins, or goes on, with `first_step`; `rows` and `tokens` are those of one epoch."""

    name: ClassVar[str] = "run_start"
    run: str
    model: str
    backend: str
    device: str
    dtype: DType
    contract: str
    first_step: int
    total_steps: int
    rows: int
    tokens: int
    trained_tokens: int


@dataclass(frozen=True, slots=True)
class StepDone(Event):
    """`loss` is the step's weighted mean; `grad_norm` is measured before clipping; `seconds` is the
    step's own wall time."""

    name: ClassVar[str] = "step"
    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    trained_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Validation(Event):
    """Weighted mean loss over the validation split."""

    name: ClassVar[str] = "validation"
    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """A checkpoint is whole and on the disk."""

    name: ClassVar[str] = "checkpoint"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, slots=True)
class RunEnd(Event):
    """The run ended after `step`; `outcome` says how."""

    name: ClassVar[str] = "run_end"
    step: int
    outcome: Literal["done", "stopped", "failed"]
    seconds: float


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """A phase or a warning, in words."""

    name: ClassVar[str] = "notice"
    message: str
    level: Literal["info", "warning"] = "info"


# --- jobs, results, context -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class TrainJob:
    """Train `start` along `steps`, which begin after `start.step`.

    `validation`, where there is any, is evaluated before the first step of a fresh run (as step 0)
    and after every step marked `evaluate`.
    """

    plan: ExecutionPlan
    model: Path
    steps: Iterable[Step]
    start: TrainState
    validation: tuple[Batch, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class TrainResult:
    """The state after the last finished step; `stopped` if more steps were planned."""

    state: TrainState
    stopped: bool


@dataclass(frozen=True, slots=True, eq=False)
class MergeTarget:
    """One tensor of the base files that the adapter changes. `path` is a key of the adapter's
    `modules`, or the name of one of its `saved` tensors."""

    path: str
    shape: ModuleShape


@dataclass(frozen=True, slots=True, eq=False)
class MergeJob:
    """Compute the changed tensors, in the order of `targets`.

    `read(tensor)` gives a tensor of the base as the files have it (numpy; bfloat16 through
    `ml_dtypes`), memory-mapped, so that one tensor at a time is enough memory. `dtype` is what the
    results are rounded to; None keeps each tensor's own.
    """

    adapter: AdapterState
    targets: tuple[MergeTarget, ...]
    read: Callable[[str], NDArray[Any]]
    dtype: DType | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MergeResult:
    """Changed tensors, lazily, in the order of the job's targets: (tensor name, array of the job's
    dtype in the stored layout). The core writes them; nothing else does."""

    tensors: Iterator[tuple[str, NDArray[Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class LoadJob:
    """Load a base model for generation or for logits, with an adapter or without.

    `streamed` asks for bounded memory: weights come from the files as layers need them.
    """

    model: Path
    dtype: DType
    adapter: AdapterState | None = None
    quant: Quant = "none"
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; `top_p` is nucleus sampling
    (Holtzman et al., arXiv:1904.09751)."""

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()


class LoadedModel(Protocol):
    """A model that answers."""

    def generate(self, tokens_T: Ints, sampling: Sampling) -> Iterator[int]:
        """New token ids, one by one; a stop token ends the stream and is not yielded."""
        ...

    def logits(self, tokens_T: Ints) -> Floats:
        """float32 logits (T, V) of one document."""
        ...

    def close(self) -> None:
        """Give back memory and devices."""
        ...


@dataclass(frozen=True, slots=True)
class World:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1


class RunContext(Protocol):
    """What the core offers a backend while it works."""

    @property
    def seed(self) -> int: ...

    @property
    def scratch(self) -> Path:
        """A folder for temporary files, removed afterwards."""
        ...

    @property
    def world(self) -> World: ...

    def emit(self, event: Event) -> None: ...

    def checkpoint_due(self, step: int) -> bool:
        """Ask after each step; on True build the state and call `checkpoint`."""
        ...

    def checkpoint(self, state: TrainState) -> None: ...

    def stop_requested(self) -> bool:
        """Ask after each step; on True finish with `stopped=True`."""
        ...


@dataclass(frozen=True, slots=True)
class Check:
    """One finding of `vox_doctor`."""

    name: str
    ok: bool
    detail: str
    remedy: str | None = None

"""`[train]`: what `vox train` and `vox plan` take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vox_core.config.data import DataSettings
from vox_core.config.values import (
    Changes,
    Count,
    DTypeChoice,
    Names,
    Paths,
    PositiveInt,
    Seconds,
    Seed,
    Share,
)
from vox_core.contract import Quant

DEFAULT_MODEL = "smollm2-135m"


class TrainSettings(DataSettings):
    """`vox train`."""

    section: ClassVar[str] = "train"

    model: str = Field(DEFAULT_MODEL, description="Base: folder, hub id, GGUF file or catalog id.")
    revision: str | None = Field(None, description="Commit or tag of a hub model.")
    template: Path | Literal["chatml", "alpaca"] | None = Field(
        None,
        description="Chat template in place of the model's own: chatml, alpaca or a Jinja file.",
    )
    data: Paths = Field(
        (),
        description="Data file (JSONL, JSON, CSV, TSV, TXT, Parquet; .gz, .zst), folder with "
        "train.jsonl (and valid.jsonl), hf:owner/name, or - for JSONL from stdin. Repeatable.",
    )
    valid: Path | None = Field(None, description="Data file with held-out rows.")
    out: Path | None = Field(None, description="Run folder to make.  [default: runs/MODEL-TIME]")
    backend: str | None = Field(None, description="Backend to use, and no other.")
    dtype: DTypeChoice = Field("auto", description="Compute dtype of the base and the adapter.")
    quant: Quant = Field(
        "none", description="Quantisation of the base's linear layers; none: as its files are."
    )
    method: Literal["lora", "rslora", "dora"] = Field("lora", description="Kind of adapter.")
    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: Annotated[float, Field(gt=0)] = Field(32.0, description="Scale is alpha / rank.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Adapter dropout.")
    targets: Names = Field(
        ("all-linear",), description="Modules to train: all-linear, or names. Repeatable."
    )
    modules_to_save: Names = Field(
        (), description="Modules trained whole, such as lm_head. Repeatable."
    )
    epochs: Annotated[float, Field(gt=0, le=1e6)] = Field(1.0, description="Passes over the data.")
    max_steps: Count = Field(0, description="Optimizer steps; 0 leaves it to --epochs.")
    batch_size: PositiveInt = Field(8, description="Conversations per optimizer step.")
    micro_batch_tokens: PositiveInt = Field(
        2048, description="Tokens computed at once; bounds memory, not a matter of the loss."
    )
    tune: Literal["use", "refresh", "ignore"] = Field(
        "use",
        description="What was measured to be fastest here: use it if it is known, measure it "
        "first, or ignore it.",
    )
    tune_budget: Literal["minimal", "balanced", "full"] = Field(
        "balanced", description="How much to measure: about one, five or twenty minutes at most."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations for the gradients: less memory, more time."
    )
    seq_len: Annotated[int, Field(gt=1)] = Field(2048, description="Longest document, in tokens.")
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="AdamW; adamw-8bit keeps the moments of large tensors in 8 bits."
    )
    lr: Annotated[float, Field(gt=0)] = Field(2e-4, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate after warm-up."
    )
    warmup: Share = Field(0.03, description="Share of the steps with a rising rate.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="AdamW's decay.")
    clip: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Bound on the global gradient norm; 0 turns it off."
    )
    seed: Seed = Field(42, description="Seed of adapter, order and dropout.")
    eval_every: Count = Field(0, description="Steps between validations; 0: only at the end.")
    save_every: Count = Field(100, description="Steps between checkpoints; 0: only at the end.")
    save_minutes: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Minutes between checkpoints, whatever the steps; 0 turns it off."
    )
    save_epochs: bool = Field(False, description="A checkpoint at the end of each epoch, too.")
    keep: PositiveInt = Field(2, description="Checkpoints to keep: so many of the newest.")
    keep_every: Count = Field(
        0, description="Keep for good the checkpoints of every so many steps; 0: of none."
    )
    max_time: Seconds = Field(
        0.0, description="Stop, resumable, after so long: 90m, 2h or seconds; 0: no limit."
    )
    patience: Count = Field(
        0, description="Stop after so many validations without a better one; 0: never."
    )
    load_best_at_end: bool = Field(
        False, description="Write the adapter of the best validation, not of the last step."
    )
    max_bad_steps: PositiveInt = Field(
        3, description="Steps in a row with a loss or gradient that is not finite, until it ends."
    )
    resume: Path | Literal["auto"] | None = Field(
        None, description="Run folder to go on with; auto: that of --out, which is begun if new."
    )
    allow_change: Changes = Field(
        (), description="What may differ from the run that is resumed. Repeatable."
    )
    allow_cpu: bool = Field(False, description="Train on the CPU though better hardware is there.")
    allow_overcommit: bool = Field(
        False, description="Train though more memory is predicted than the device has."
    )

    @model_validator(mode="after")
    def _data_of_sources(self) -> Self:
        """The paths of the sources are the data."""
        paths = tuple(source.path for source in self.source)
        if paths and self.data not in ((), paths):
            raise ValueError("data and source exclude each other: a source names data and a weight")
        if paths:
            self.__dict__["data"] = paths
            self.model_fields_set.add("data")
        return self

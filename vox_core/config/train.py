"""`[train]`: the settings of `vox train` and `vox plan`."""

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

    model: str = Field(
        DEFAULT_MODEL, description="Base model: folder, hub id, GGUF file or catalog id."
    )
    revision: str | None = Field(None, description="Commit or tag of a hub model.")
    template: Path | Literal["chatml", "alpaca"] | None = Field(
        None,
        description="Chat template instead of the model's own: chatml, alpaca or a Jinja file.",
    )
    data: Paths = Field(
        (),
        description="Data file (JSONL, JSON, CSV, TSV, TXT, Parquet; .gz, .zst), folder with "
        "train.jsonl (and valid.jsonl), hf:owner/name, or - for JSONL from stdin. Repeatable.",
    )
    valid: Path | None = Field(None, description="Validation data file.")
    out: Path | None = Field(None, description="Run folder to create.  [default: runs/MODEL-TIME]")
    backend: str | None = Field(None, description="Use this backend only.")
    dtype: DTypeChoice = Field("auto", description="Compute dtype of the base and the adapter.")
    quant: Quant = Field(
        "none", description="Quantisation of the base's linear layers; none: as stored."
    )
    method: Literal["lora", "rslora", "dora"] = Field("lora", description="Adapter type.")
    rank: PositiveInt = Field(16, description="Rank of the adapter.")
    alpha: Annotated[float, Field(gt=0)] = Field(
        32.0, description="LoRA alpha; the scale is alpha / rank."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="Adapter dropout.")
    targets: Names = Field(
        ("all-linear",),
        description="Modules that get an adapter: all-linear, or names. Repeatable.",
    )
    modules_to_save: Names = Field(
        (), description="Modules trained in full, such as lm_head. Repeatable."
    )
    epochs: Annotated[float, Field(gt=0, le=1e6)] = Field(1.0, description="Passes over the data.")
    max_steps: Count = Field(0, description="Max optimizer steps; 0: set by --epochs.")
    batch_size: PositiveInt = Field(8, description="Examples per optimizer step.")
    micro_batch_tokens: PositiveInt = Field(
        2048, description="Max tokens per micro-batch. Affects memory and speed, not results."
    )
    tune: Literal["use", "refresh", "ignore"] = Field(
        "use",
        description="Fastest settings for this machine: use stored measurements, refresh them "
        "before training, or ignore them.",
    )
    tune_budget: Literal["minimal", "balanced", "full"] = Field(
        "balanced", description="Time limit of measuring: about 1, 5 or 20 minutes."
    )
    gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, slower."
    )
    seq_len: Annotated[int, Field(gt=1)] = Field(
        2048, description="Max tokens per example; longer ones are cut or split."
    )
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="AdamW; adamw-8bit stores its state of large tensors in 8 bits."
    )
    lr: Annotated[float, Field(gt=0)] = Field(2e-4, description="Peak learning rate.")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Learning rate schedule after warm-up."
    )
    warmup: Share = Field(0.03, description="Fraction of the steps that warm up the learning rate.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="Weight decay of AdamW.")
    clip: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Gradient clipping (max global norm); 0 disables."
    )
    seed: Seed = Field(42, description="Seed of adapter weights, data order and dropout.")
    eval_every: Count = Field(0, description="Steps between validations; 0: only at the end.")
    save_every: Count = Field(100, description="Steps between checkpoints; 0: only at the end.")
    save_minutes: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Also save a checkpoint every so many minutes; 0 disables."
    )
    save_epochs: bool = Field(False, description="Also save a checkpoint after each epoch.")
    keep: PositiveInt = Field(2, description="Number of newest checkpoints to keep.")
    keep_every: Count = Field(
        0, description="Never delete checkpoints of multiples of this step; 0 disables."
    )
    max_time: Seconds = Field(
        0.0, description="Stop after this time and save: 90m, 2h or seconds; 0: no limit."
    )
    patience: Count = Field(
        0, description="Stop after this many validations without improvement; 0: never."
    )
    load_best_at_end: bool = Field(
        False, description="Write the adapter with the lowest validation loss, not the last."
    )
    max_bad_steps: PositiveInt = Field(
        3, description="Abort after this many consecutive steps with NaN or infinite values."
    )
    resume: Path | Literal["auto"] | None = Field(
        None, description="Run folder to resume; auto: that of --out, or a new run."
    )
    allow_change: Changes = Field(
        (), description="Setting that may differ from the resumed run. Repeatable."
    )
    allow_cpu: bool = Field(False, description="Train on the CPU even if there is an accelerator.")
    allow_overcommit: bool = Field(
        False, description="Train even if predicted memory exceeds the device's."
    )

    @model_validator(mode="after")
    def _data_of_sources(self) -> Self:
        """Set `data` to the paths of `source`."""
        paths = tuple(source.path for source in self.source)
        if paths and self.data not in ((), paths):
            raise ValueError("data and source exclude each other: a source names data and a weight")
        if paths:
            self.__dict__["data"] = paths
            self.model_fields_set.add("data")
        return self

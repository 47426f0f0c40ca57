"""Map the setting names of TRL, transformers, PEFT, Unsloth and mlx-lm to those of vox.

The names are hints, not aliases: `--learning-rate` is an error that names `--lr`. Where the meaning
differs the hint says how, so that nobody copies a number that means something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from vox_core.text import nearest

_BATCH = "it counts the examples of a whole optimizer step: per-device batch size x accumulation"
_ACCUMULATION = f"{_BATCH}; micro-batch-tokens then bounds memory, and never changes the loss"

_PACKED = (
    "nothing to set: examples are packed up to --micro-batch-tokens and never attend to one another"
)
_ANSWERS = "nothing to set: what the assistant says is trained, and nothing else"

_OF_OBJECTIVES = (
    "beta loss-type label-smoothing simpo-gamma desirable-weight undesirable-weight epsilon "
    "epsilon-high scale-rewards importance-sampling-level"
)

PEERS: dict[str, tuple[str, str]] = {
    "learning-rate": ("lr", ""),
    "lora-r": ("rank", ""),
    "lora-rank": ("rank", ""),
    "lora-alpha": ("alpha", ""),
    "lora-dropout": ("dropout", ""),
    "lora-target-modules": ("targets", ""),
    "target-modules": ("targets", ""),
    "lora-modules-to-save": ("modules-to-save", ""),
    "num-train-epochs": ("epochs", ""),
    "num-epochs": ("epochs", ""),
    "iters": ("max-steps", ""),
    "per-device-train-batch-size": ("batch-size", _BATCH),
    "train-batch-size": ("batch-size", _BATCH),
    "gradient-accumulation-steps": ("batch-size", _ACCUMULATION),
    "grad-accumulation-steps": ("batch-size", _ACCUMULATION),
    "max-seq-length": ("seq-len", ""),
    "max-seq-len": ("seq-len", ""),
    "max-length": ("seq-len", ""),
    "packing": ("", _PACKED),
    "use-dora": ("method", "dora"),
    "use-rslora": ("method", "rslora"),
    "r": ("rank", ""),
    "assistant-only-loss": ("", _ANSWERS),
    "completion-only-loss": ("", _ANSWERS),
    "train-on-responses-only": ("", _ANSWERS),
    "mask-prompt": ("", _ANSWERS),
    "dataset-text-field": ("", "map the column: --field text=NAME"),
    "cutoff-len": ("seq-len", ""),
    "val-size": ("valid-share", ""),
    "device": ("backend", "a backend stands for its device"),
    "save-strategy": ("save-every", "in steps; or --save-epochs, --save-minutes"),
    "eval-strategy": ("eval-every", "in steps"),
    "lr-scheduler-type": ("schedule", ""),
    "warmup-ratio": ("warmup", ""),
    "warmup-steps": ("warmup", "it is a share of all steps: warm-up steps / steps"),
    "max-grad-norm": ("clip", ""),
    "optim": ("optimizer", ""),
    "eval-steps": ("eval-every", ""),
    "eval-dataset": ("valid", ""),
    "eval-file": ("valid", ""),
    "val-file": ("valid", ""),
    "save-steps": ("save-every", ""),
    "save-total-limit": ("keep", ""),
    "output-dir": ("out", ""),
    "resume-from-checkpoint": ("resume", "it names the run folder"),
    "load-in-4bit": ("quant", "nf4 is QLoRA's 4 bits"),
    "load-in-8bit": ("quant", "int8"),
    "bf16": ("dtype", "bf16"),
    "fp16": ("dtype", "fp16"),
    "base-model": ("model", ""),
    "model-name": ("model", ""),
    "model-name-or-path": ("model", ""),
    "dataset-name": ("data", "a data set of the hub is hf:owner/name"),
    "train-file": ("data", ""),
    "chat-template": ("template", ""),
    "max-new-tokens": ("max-tokens", ""),
    "prompt": ("", 'the prompt has no flag: vox generate RUN "…"'),
    "report-to": (
        "",
        "trackers are plugins, and need no setting: vox plugin install tensorboard; "
        "telemetry.jsonl in the run folder has every step",
    ),
    "num-generations": ("rollouts", ""),
    "num-iterations": ("updates", ""),
    "max-completion-length": ("rollout-tokens", ""),
    "max-prompt-length": ("seq-len", "it counts prompt and answer together"),
    "reward-funcs": ("reward", ""),
    "teacher-model-name-or-path": ("teacher", ""),
    **{
        name: ("objective", f"an option of it: -O {name.replace('-', '_')}=VALUE")
        for name in _OF_OBJECTIVES.split()
    },
    "logging-steps": ("", "every step is logged, to telemetry.jsonl in the run folder"),
}
"""Name of a peer's -> setting of vox ("" for none), and what differs."""


def meant(name: str, known: Collection[str], shown: Callable[[str], str] = str) -> str:
    """Suggest the setting for an unknown one: by the peers' names, else by spelling.

    Args:
        known: existing settings, in kebab-case.
        shown: formats a setting for the message, such as with dashes before it.

    Returns:
        The hint, or "".
    """
    spelt = name.lower().replace("_", "-")
    setting, differs = PEERS.get(spelt, (spelt, ""))
    if not setting:
        return differs
    if setting in known:
        return f"did you mean {shown(setting)}?" + (f" ({differs})" if differs else "")
    near = nearest(spelt, known)
    return f"did you mean {shown(near)}?" if near else ""

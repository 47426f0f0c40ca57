"""vox's exceptions, their codes, and the format of an error message.

    VoxError
    ├── InputError          exit 2   bad input, found before any work
    │   ├── ConfigError              vox.toml, environment, flags
    │   ├── DataError                training or validation data
    │   ├── ModelError               model reference, weights, tokenizer
    │   ├── AdapterError             adapter files, adapter does not fit base
    │   ├── OutputError              where the results should go
    │   ├── PlanError                contract, backend and model do not fit together
    │   └── BackendError             no backend, or one that cannot be used
    └── WorkError           exit 1   failed while working; finished work is kept
        ├── StorageError             disk full, I/O error
        ├── TrainingError            NaN or infinite numbers, out of memory
        ├── ProofError               a result that fails verification
        └── PluginError              a plugin raised something else

Every error carries a code (`VOX-D003`) from the table below, which is also the source of
`docs/reference/errors.md`, and says what is wrong, where, what was found, what was expected and
what to do next. Foreign exceptions are mapped to these once, at the edge where they arise.
This module neither prints nor exits.
"""

from __future__ import annotations

import copyreg
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Self

MAX_FAULTS_SHOWN = 20
_CREDENTIALS = re.compile(r"(\b[A-Za-z][A-Za-z0-9+.-]{0,20}://)[^/@\s'\"]{1,500}@")

CODES: dict[str, str] = {
    "C001": "unknown key in vox.toml, the environment or the flags",
    "C002": "a setting is not valid, or contradicts another",
    "C003": "vox.toml cannot be read",
    "C004": "a setting is missing, or two exclude each other",
    "C005": "the catalog is invalid",
    "C006": "the command line is wrong",
    "C007": "the catalog has no entry of that id",
    "C008": "the list of disabled plugins cannot be read",
    "C009": "a command needs a package that is not installed",
    "C010": "an evaluation suite is invalid",
    "C011": "two evaluations cannot be compared",
    "C012": "a gate is invalid, or its suites cannot decide it",
    "D001": "a data file is missing",
    "D002": "a data file is empty",
    "D003": "rows of a data file are malformed",
    "D004": "no token, or no end-of-turn token, would be trained",
    "D005": "the chat template is missing or cannot render the data",
    "D006": "every row was dropped",
    "D007": "a conversation is longer than the model can read",
    "D010": "a data file cannot be read without a package that is not installed",
    "D011": "the hub has no such dataset",
    "D012": "a dataset of the hub cannot be loaded",
    "D013": "a folder has several files that could be its data",
    "D014": "a task has no such name or option",
    "D020": "more rows are malformed than may be skipped",
    "D021": "a filter names a value that no row has",
    "D022": "rows have no rating, and no setting says whether to keep them",
    "D023": "the data filters leave no row, or none for validation",
    "D030": "the sources have too few rows for the mixture",
    "D031": "no row has a difficulty, which the curriculum needs",
    "D032": "a source has a weight and would never be trained",
    "D033": "rows do not fit the objective",
    "D050": "the masks of the data are wrong",
    "D051": "the row to show does not exist",
    "D060": "there is nothing to extract rows from",
    "D061": "nothing was extracted",
    "M001": "no model found for the reference",
    "M002": "the model folder cannot be used",
    "M003": "a safetensors file is corrupt or truncated",
    "M004": "the model needs code from its repository (trust_remote_code)",
    "M005": "the model has no safetensors weights",
    "M006": "a downloaded file does not have the pinned SHA-256",
    "M007": "the model could not be downloaded",
    "M008": "the GGUF file cannot be converted",
    "M009": "a promoted model has changed, or the registry cannot be read or moved",
    "A001": "the folder has no readable adapter",
    "A002": "the adapter does not belong to this base model",
    "A003": "the adapter uses an unsupported feature",
    "O001": "the output path exists",
    "O002": "the output folder cannot be written",
    "O003": "another process is working in this run folder",
    "O004": "the output path overlaps an input",
    "O005": "files could not be uploaded",
    "P001": "a setting cannot be used with this model or backend",
    "P002": "a target module does not exist in the model",
    "P003": "the run cannot be resumed with these settings or data",
    "P004": "the run needs more memory than the device has",
    "P010": "the plan is invalid",
    "P011": "the run would differ from the plan",
    "P012": "a flag contradicts the plan",
    "P013": "the processes of a run differ",
    "B001": "no backend is installed",
    "B002": "no installed backend meets the request",
    "B003": "the requested backend or plugin is not installed",
    "B004": "the backend is installed but broken",
    "B005": "two backends tie",
    "B006": "a plugin's manifest is missing or invalid",
    "B007": "an accelerator is idle: its backend is missing, broken or without its driver",
    "B008": "a bundle contradicts its lock or the catalog",
    "B009": "a bundle is not for this machine or this Python",
    "B010": "a bundle cannot be built from the available wheels and sources",
    "B011": "a folder is not the project of one plugin",
    "B012": "a bundle file cannot be opened",
    "B013": "no installed plugin provides the requested feature",
    "B014": "two plugins provide the same name",
    "I001": "vox does not install into this Python environment",
    "I002": "the catalog has no such plugin",
    "I003": "the source of a plugin cannot be used",
    "I004": "uv finds no compatible set of packages",
    "I005": "the core, torch or a dependency of an installed plugin would change",
    "I006": "the vox command or the vox_core package belongs to another distribution",
    "I007": "a plugin's file does not have the SHA-256 of the catalog",
    "I008": "the installation failed, and the environment is as it was",
    "I009": "the environment could not be restored entirely",
    "I010": "the plugin is not installed, or not in this environment",
    "I011": "another vox is changing this Python environment, or has changed it since the plan",
    "I012": "a change of the environment was not confirmed",
    "I013": "an earlier change of the environment was interrupted",
    "S001": "the disk is full",
    "S002": "a file could not be read or written",
    "T001": "a loss, a gradient, weights or logits are not finite",
    "T002": "out of memory",
    "T003": "an objective gave weights of a wrong shape",
    "T004": "an answer cannot be scored",
    "T005": "log-probabilities differ between sampling and training",
    "T006": "a process of the run has ended, hangs or cannot be reached",
    "V001": "the merged model does not reproduce base + adapter",
    "V002": "the adapter changes nothing",
    "V003": "the converted adapter computes other results than its source",
    "V004": "a loaded adapter does not reproduce its log-probabilities of training",
    "V005": "the records of a promotion contradict its decision",
    "V006": "an exported model computes other results than its source",
    "V007": "uploaded files differ from those here",
    "X001": "a plugin failed",
    "X002": "a bug in vox",
    "X003": "a wheel of a bundle could not be built or fetched",
}


SOURCES: ContextVar[Mapping[str, str]] = ContextVar("SOURCES")
"""Setting -> the variable or file that it comes from, for settings read that no flag gives."""


def command(*words: object) -> str:
    """Join words into a shell command line, quoted where needed."""
    return shlex.join(map(str, words))


class VoxError(Exception):
    """An error with a code, location and remedy, in the user's terms.

    Args:
        code: key of `CODES`; shown as `VOX-<code>`.
        what: one line that says what is wrong.
        where: file, line, key, plugin: the place to look.
        found: the value found.
        expected: the value expected.
        remedy: the next step for the user.
        faults: the single faults, if there are several; all are kept, the first 20 shown.
    """

    exit_code = 1

    def __init__(
        self,
        code: str,
        what: str,
        *,
        remedy: str,
        where: object = None,
        found: object = None,
        expected: object = None,
        faults: Sequence[str] = (),
    ) -> None:
        assert code in CODES, code
        self.code = f"VOX-{code}"
        self.what = _shown(what)
        super().__init__(self.what)
        self.where = None if where is None else _shown(where)
        self.found = None if found is None else _shown(found)
        self.expected = None if expected is None else _shown(expected)
        self.remedy = _shown(remedy)
        self.faults = tuple(map(_shown, faults))

    def but(self, **changes: Any) -> Self:
        """Return the same error with these parts replaced."""
        parts = ("what", "where", "found", "expected", "remedy", "faults")
        given = {name: getattr(self, name) for name in parts}
        return type(self)(self.code.removeprefix("VOX-"), **{**given, **changes})

    def respell(self, spelling: Callable[[str], str]) -> None:
        """Change vox's own words: all but a place, and a thing found, that are no flag."""
        for name in ("what", "where", "found", "expected", "remedy"):
            text = getattr(self, name) or ""
            if name not in ("where", "found") or text.startswith(("-", "no -")):
                setattr(self, name, spelling(text) or None)
        self.args, self.faults = (self.what,), tuple(map(spelling, self.faults))

    def name_sources(self) -> None:
        """Add to the flags at fault where their values come from: `--lr (lr from vox.toml)`."""

        def named(text: str) -> str:
            flags = re.findall(r"(?<![\w/-])--([a-z]+(?:-[a-z]+)*)", text)
            names = dict.fromkeys(flag + s for flag in flags for s in ("", "s"))  # --field, fields
            origins = {name: SOURCES.get({}).get(name.replace("-", "_")) for name in names}
            said = ", ".join(f"{flag} from {origin}" for flag, origin in origins.items() if origin)
            return text if said in text else f"{text} ({said})"  # a rank has said it already

        if self.where and self.where.startswith("-"):
            self.where = named(self.where)
        self.found, self.faults = self.found and named(self.found), tuple(map(named, self.faults))

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}"]
        for label in ("where", "found", "expected"):
            if (value := getattr(self, label)) is not None:
                lines.append(f"  {label + ':':<9} {value}")
        lines += [f"  - {fault}" for fault in self.faults[:MAX_FAULTS_SHOWN]]
        if (more := len(self.faults) - MAX_FAULTS_SHOWN) > 0:
            lines.append(f"  … and {more} more ({len(self.faults)} in all)")
        lines.append(f"next: {self.remedy}")
        return "\n".join(lines)


def _shown(value: object) -> str:
    """Convert to text without the credentials in URLs, since errors are pasted into reports."""
    text = str(value)
    return _CREDENTIALS.sub(r"\1", text) if "@" in text else text


class InputError(VoxError):
    """Bad input or wrong usage, found before any work was done."""

    exit_code = 2


class ConfigError(InputError):
    """An error in `vox.toml`, an environment variable or a flag."""


class DataError(InputError):
    """An error in training or validation data."""


class ModelError(InputError):
    """An error in a model reference, its weights, configuration or tokenizer."""


class AdapterError(InputError):
    """An error in adapter files, or an adapter that does not fit its base."""


class OutputError(InputError):
    """An output path that cannot be used."""


class PlanError(InputError):
    """Contract, backend and model do not fit together."""


class BackendError(InputError):
    """No backend, or an unusable one."""


class WorkError(VoxError):
    """A failure while working; finished work is kept.

    Attributes:
        before_update: raised in a training step that has changed nothing.
    """

    before_update = False


class StorageError(WorkError):
    """The disk is full, or there was an I/O error."""


class TrainingError(WorkError):
    """Training failed: NaN or infinite numbers, or out of memory."""


def unreachable(rank: int, size: int, error: Exception) -> TrainingError:
    """Return the error of a rank that cannot reach another one (T006)."""
    return TrainingError(
        "T006",
        "another process of the run cannot be reached",
        where=f"rank {rank} of {size}, process {os.getpid()} on {os.uname().nodename}",
        found=" ".join(str(error).split())[:400],
        remedy="look at the errors of the other ranks, and resume with vox train --resume RUN, on "
        "any number of processes",
    )


class ProofError(WorkError):
    """A result that fails verification."""


class PluginError(WorkError):
    """A plugin raised an exception other than `VoxError`."""

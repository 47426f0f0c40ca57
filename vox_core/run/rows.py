"""The rows that a run trains on, and those it is judged by: data files, and what is chosen."""

from __future__ import annotations

import json
from pathlib import Path

from vox_core import files
from vox_core.config import TrainSettings
from vox_core.data.checked import CheckedFile
from vox_core.data.chosen import Chosen, Tell, choose_rows
from vox_core.data.row_report import Report
from vox_core.data.split import find_split
from vox_core.errors import ConfigError


def checked_files(settings: TrainSettings) -> tuple[list[CheckedFile], list[CheckedFile]]:
    """Files to train on, and to validate on, with the rows that the policy leaves of them.

    Raises:
        ConfigError: C004, C009.
        DataError: D001, D002, D003, D020 to D023.
    """
    chosen = chosen_rows(settings)
    return chosen.train, chosen.valid


def chosen_rows(settings: TrainSettings, tell: Tell | None = None) -> Chosen:
    """The same, with the report of what became of every row.

    Raises:
        ConfigError: C004, no data is named, or held-out rows twice; C009, datasketch is missing.
        DataError: D001, D002, D003, D020 to D023.
    """
    if not settings.data:
        raise ConfigError(
            "C004",
            "there is no data",
            where="--data",
            expected="a data file, a folder with train.jsonl, or hf:owner/name",
            remedy="name it: --data train.jsonl; `vox quickstart` shows one that works",
        )
    train, valid = find_split(settings.data, settings.valid)
    if settings.valid_share and valid:
        raise ConfigError(
            "C004",
            "held-out rows are asked for twice",
            where="--valid-share",
            found=f"{', '.join(map(str, valid))}, too",
            expected="a share of the rows, or a file of them",
            remedy="leave out --valid-share or --valid; of a folder, name its train.jsonl",
        )
    return choose_rows(train, valid, settings.policy(), tell, settings.fields)


def write_skipped(path: Path, report: Report | None) -> None:
    """Write each row that is malformed or a duplicate as a line of JSON, if there are any.

    Raises:
        StorageError: the disk is full, or an I/O error.
    """
    rows = [each.to_json() for each in report.listed] if report else []
    if rows:
        files.write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

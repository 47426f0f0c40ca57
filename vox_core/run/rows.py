"""The rows that a run trains on, and those it is judged by: data files, looked at."""

from __future__ import annotations

from vox_core.config import TrainSettings
from vox_core.data.checked import CheckedFile, check_files
from vox_core.data.records import find_split
from vox_core.errors import ConfigError


def checked_files(settings: TrainSettings) -> tuple[list[CheckedFile], list[CheckedFile]]:
    """Files to train on, and to validate on.

    Raises:
        ConfigError: C004, no data is named.
        DataError: D001, D002, D003.
    """
    if not settings.data:
        raise ConfigError(
            "C004",
            "there is no data to train on",
            where="--data",
            expected="a JSONL file, or a folder with train.jsonl",
            remedy="vox train --data train.jsonl; `vox quickstart` shows one that works",
        )
    train, valid = find_split(settings.data, settings.valid)
    fields = settings.fields
    return check_files(train, fields), check_files(valid, fields) if valid else []

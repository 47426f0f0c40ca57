"""Data: rows, their facts and masks, tokens as training makes them, data sets."""

from vox_core.cache import CACHE_VERSION
from vox_core.data.audit import Audit, Finding, require_sound, row_findings
from vox_core.data.checked import CheckedFile, check_files
from vox_core.data.chosen import no_such_value
from vox_core.data.dataset import build_dataset
from vox_core.data.encode import Encoded, Encoder
from vox_core.data.encode_stats import stats_of
from vox_core.data.faults import RowError, RowFault, changed
from vox_core.data.jsonl import numbered_lines, raw_lines
from vox_core.data.readers import FieldMap, Source, is_remote, open_source
from vox_core.data.readers.opened import most_bytes, too_much
from vox_core.data.records import Placed, read_lines, readable
from vox_core.data.render import RenderError
from vox_core.data.row_facts import (
    KEPT,
    NO_VALUE,
    RowFacts,
    digests,
    duplicates,
    filtered,
    value_counts,
)
from vox_core.data.rows import Record, read_row
from vox_core.data.sampler import apportion
from vox_core.data.split import find_split
from vox_core.data.tokenizer import Tokens, special_ids, tokenise
from vox_core.models import Progress
from vox_core.run.dataset import Opener
from vox_core.run.inputs import chosen_rows

__all__ = [
    "CACHE_VERSION",
    "KEPT",
    "NO_VALUE",
    "Audit",
    "CheckedFile",
    "Encoded",
    "Encoder",
    "FieldMap",
    "Finding",
    "Opener",
    "Placed",
    "Progress",
    "Record",
    "RenderError",
    "RowError",
    "RowFacts",
    "RowFault",
    "Source",
    "Tokens",
    "apportion",
    "build_dataset",
    "changed",
    "check_files",
    "chosen_rows",
    "digests",
    "duplicates",
    "filtered",
    "find_split",
    "is_remote",
    "most_bytes",
    "no_such_value",
    "numbered_lines",
    "open_source",
    "raw_lines",
    "read_lines",
    "read_row",
    "readable",
    "require_sound",
    "row_findings",
    "special_ids",
    "stats_of",
    "tokenise",
    "too_much",
    "value_counts",
]

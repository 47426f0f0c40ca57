"""Data: rows, their facts and masks, tokens as training makes them, data sets."""

from vox_core.cache import CACHE_VERSION
from vox_core.data.audit import Audit, Finding, require_sound, row_findings
from vox_core.data.checked import CheckedFile, check_files
from vox_core.data.chosen import no_such_value
from vox_core.data.dataset import build_dataset
from vox_core.data.documents import Columns
from vox_core.data.encode import Encoded, Encoder
from vox_core.data.encode_stats import StatsCollector
from vox_core.data.faults import RowError, RowFault, changed
from vox_core.data.fields import FieldMap
from vox_core.data.formats import is_remote, place_of
from vox_core.data.jsonl import raw_lines
from vox_core.data.records import Placed, next_step, read_lines, readable
from vox_core.data.render import Renderer, RenderError
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
from vox_core.data.source import Source, most_bytes, open_source, too_much
from vox_core.data.split import find_split
from vox_core.data.tokenizer import Tokens, special_ids, tokenise
from vox_core.models import Progress
from vox_core.run.dataset import Opener, audits_of
from vox_core.run.inputs import chosen_rows

__all__ = [
    "CACHE_VERSION",
    "KEPT",
    "NO_VALUE",
    "Audit",
    "CheckedFile",
    "Columns",
    "Encoded",
    "Encoder",
    "FieldMap",
    "Finding",
    "Opener",
    "Placed",
    "Progress",
    "Record",
    "RenderError",
    "Renderer",
    "RowError",
    "RowFacts",
    "RowFault",
    "Source",
    "StatsCollector",
    "Tokens",
    "apportion",
    "audits_of",
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
    "next_step",
    "no_such_value",
    "open_source",
    "place_of",
    "raw_lines",
    "read_lines",
    "read_row",
    "readable",
    "require_sound",
    "row_findings",
    "special_ids",
    "tokenise",
    "too_much",
    "value_counts",
]

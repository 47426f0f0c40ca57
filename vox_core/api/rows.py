"""Data: rows, their facts and masks, tokens as training makes them, data sets."""

from vox_core.cache import CACHE_VERSION as CACHE_VERSION
from vox_core.data.audit import (
    Audit as Audit,
    Finding as Finding,
    require_sound as require_sound,
    row_findings as row_findings,
)
from vox_core.data.checked import CheckedFile as CheckedFile, check_files as check_files
from vox_core.data.chosen import no_such_value as no_such_value
from vox_core.data.dataset import encode_rows as encode_rows, require_trained as require_trained
from vox_core.data.encode import Encoded as Encoded, Encoder as Encoder, stats_of as stats_of
from vox_core.data.faults import (
    RowError as RowError,
    RowFault as RowFault,
    changed as changed,
    faulty as faulty,
    json_type as json_type,
    text_of as text_of,
)
from vox_core.data.fields import FieldMap as FieldMap
from vox_core.data.formats import find_split as find_split, is_remote as is_remote
from vox_core.data.formats import place_of as place_of
from vox_core.data.json_rows import (
    file_faults as file_faults,
    parse_object as parse_object,
    raw_lines as raw_lines,
)
from vox_core.data.records import (
    Placed as Placed,
    STEP as STEP,
    listed as listed,
    next_step as next_step,
    read_lines as read_lines,
    readable as readable,
)
from vox_core.data.render import Renderer as Renderer, RenderError as RenderError
from vox_core.data.row_facts import (
    KEPT as KEPT,
    NO_VALUE as NO_VALUE,
    RowFacts as RowFacts,
    digests as digests,
    duplicates as duplicates,
    filtered as filtered,
    row_text as row_text,
    value_counts as value_counts,
)
from vox_core.data.rows import load_rewards as load_rewards, objective_of as objective_of
from vox_core.data.rows import Row as Row, answer_text as answer_text, answers_for as answers_for
from vox_core.data.rows import Answers as Answers, Examples as Examples, examples_of as examples_of
from vox_core.data.rows import Record as Record, read_row as read_row, row_of as row_of
from vox_core.data.batching import apportion as apportion
from vox_core.data.source import (
    RowSource as RowSource,
    most_bytes as most_bytes,
    open_source as open_source,
    too_much as too_much,
)
from vox_core.data.tokenizer import (
    Tokens as Tokens,
    special_ids as special_ids,
    tokenise as tokenise,
)
from vox_core.run.inputs import Opener as Opener, chosen_rows as chosen_rows

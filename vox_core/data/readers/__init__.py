"""Data files of any format, as JSONL.

    plain JSONL           itself
    anything else         read once, streaming, into a JSONL file in the cache, line N for row N

What comes after (checks, blocks, processes, masks of rows) reads JSONL alone. formats.py says what
a file is by its name, opened.py undoes gzip and zstd, json_rows.py and tables.py read rows, plugins
read what they declare in `row-sources`, mapping.py puts a row's fields where vox looks for them,
source.py keeps the result. A row that cannot be read is a line with its faults (`jsonl.unread`), so
that it is reported where it stands, together with the others.

Nothing here keeps more of a file in memory than a row at a time.
"""

from vox_core.data.fields import NO_FIELDS, FieldMap
from vox_core.data.formats import format_of, is_plain, is_remote, place_of
from vox_core.data.readers.source import Source, open_source

__all__ = [
    "NO_FIELDS",
    "FieldMap",
    "Source",
    "format_of",
    "is_plain",
    "is_remote",
    "open_source",
    "place_of",
]

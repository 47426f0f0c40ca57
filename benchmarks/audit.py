"""What the audit costs where tokens are made: parts with and without what is noticed of rows.

    python benchmarks/audit.py [--rows 4000] [--rounds 5]

The same blocks of conversations (`tokenising.py`), in one process, the two ways in turn; processor
time of `make_part`. An audit of what is in the cache is timed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

from benchmarks.tokenising import conversations
from vox_core import models
from vox_core.data import encode_stats, tokenize_job
from vox_core.data.audit import audit
from vox_core.data.blocks import cut
from vox_core.data.checked import check_files
from vox_core.data.dataset_cache import open_dataset
from vox_core.data.encode import Encoder
from vox_core.data.tokenizer import load_tokenizer


class Blind(encode_stats.StatsCollector):
    """Looks at nothing."""

    def rendered(self, *_: object) -> None: ...

    def encoded(self, *_: object) -> None: ...

    def columns(self, *_: object) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    model = models.resolve("smollm2-135m").path
    encoder = Encoder(load_tokenizer(model), 2048)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        rows = conversations(asked.rows, varied=True)
        path.write_text("\n".join(json.dumps(row) for row in rows))
        blocks = [*cut([path])]
        times: dict[type, list[float]] = {encode_stats.StatsCollector: [], Blind: []}
        for _ in range(asked.rounds):
            for kind, taken in times.items():
                began = time.process_time()
                with patch.object(tokenize_job, "StatsCollector", kind):
                    for block in blocks:
                        tokenize_job.make_part(encoder, block)
                taken.append(time.process_time() - began)
        pairs = zip(times[encode_stats.StatsCollector], times[Blind], strict=True)
        print(*(f"{a:.2f} s with, {b:.2f} s without" for a, b in zip(*times.values(), strict=True)))
        print(f"ratio {statistics.median(a / b for a, b in pairs):.3f} (median)")
        dataset = open_dataset(check_files([path]), model, lambda: load_tokenizer(model), 2048)
        began = time.perf_counter()
        audit(dataset, [path], 49152)
        print(f"audit of what is kept: {1e3 * (time.perf_counter() - began):.2f} ms")


if __name__ == "__main__":
    main()

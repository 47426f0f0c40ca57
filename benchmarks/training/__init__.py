"""vox's training held against its peers, side by side, on this machine, now.

    inputs      shapes.py (public configurations), models.py (folders), documents.py (token ids)
    one run     task.py (what it is told), worker.py (a process of its own), trainers/ (who trains)
    one cell    cells.py (what is measured), rounds.py (interleaved), gate.py (same losses or void)
    numbers     flops.py, stats.py, machine.py
    telling     result.py (JSON), table.py (terminal and Markdown), report.py (docs/benchmarks.md)

Every trainer of a cell gets the same token ids in the same optimizer steps, the same adapter to
start from, the same rates, clipping and number of threads; the rounds are interleaved, and each run
is a new process. A trainer whose losses are not those of transformers and PEFT in float32 has no
result, vox included.
"""

"""The CPU's cells: `python -m benchmarks.training [--quick]`, or `make bench`."""

from __future__ import annotations

from benchmarks.training import cells, command

if __name__ == "__main__":
    command.main("benchmarks.training", "cpu", cells.cpu)

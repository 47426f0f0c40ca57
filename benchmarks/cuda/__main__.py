"""The GPU's cells: `python -m benchmarks.cuda [--quick]`, in an environment with vox-ml-cuda and
`benchmarks/requirements.txt`.

Without a GPU the way through can be tried on the processor: `--device cpu --model tiny --steps 3
--rounds 1 --cell smollm2-135m/bf16 --results /tmp/trial`. NF4 needs the GPU.
"""

from __future__ import annotations

from benchmarks.training import cells, command

if __name__ == "__main__":
    command.main("benchmarks.cuda", "cuda", cells.cuda)

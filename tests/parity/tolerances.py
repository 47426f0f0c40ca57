"""How far two right float32 backends may be from one another: every tolerance of this folder's
comparison of `cpu` with `mlx` and `cuda`, with where it comes from.

"Noise" is the distance of either backend from float64 (`benchmarks/parity_noise.py`, the largest of
eight families and three methods; both backends show the same). Two backends may differ by twice
that; a tolerance is at least four times as much, and at most a thousandth of what a real mistake
makes: test_traps.py has the mistakes.
"""

from __future__ import annotations

# Relative Frobenius norm of (T, V). Noise 1.3e-6.
LOGITS = 1e-5
# Relative, at each of 20 steps. Noise 1.8e-7; DESIGN.md, "The seam", promises 1e-5.
LOSS = 1e-5
# Relative, at each of 20 steps. Noise 8.5e-7.
GRADIENT_NORM = 1e-5
# Relative Frobenius norm over all of A's, or of B's. Noise 1.3e-6; of qwen3_5 with rsLoRA 8.3e-6 on
# `cpu`, as much as transformers and PEFT themselves have there, and 2.6e-6 on `mlx`. The most is in
# the projection that decides the decay of its linear attention.
GRADIENT = 4e-5
# First and second moments after 20 steps, likewise. Noise 1.5e-6. torch's fused AdamW computes
# 1 - beta2 in float32 on CUDA: 0.999 is rounded first, and second moments are 1.29e-5 too small.
MOMENTS = {"mlx": 1e-5, "cuda": 2e-5}
# The adapter after 20 steps, likewise. Noise 2.9e-4: Adam turns noise in a gradient near zero into
# a step of the learning rate. DESIGN.md promises 1e-3.
ADAPTER = 1e-3
# Merged weights from one adapter, relative Frobenius norm. One rounding of float32 is 6e-8, and the
# product of rank 4 adds a few.
MERGED = 1e-6
# A matrix product of 64 x 96 x 48, relative Frobenius norm. Noise 1.5e-7.
PRODUCT = 1e-6

"""Attention in blocks is attention: the same numbers, for rows that blocks do not divide too."""

from __future__ import annotations

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.base import create_causal_mask, scaled_dot_product_attention

from vox_mlx.attention import attend_in_blocks
from vox_mlx.base import load_base
from vox_testing.llama import write_llama


class Attention(nn.Module):
    """As mlx-lm's models call it."""

    def __call__(self, queries, keys, values, mask, cache=None):
        return scaled_dot_product_attention(queries, keys, values, cache, 0.25, mask)


class Inherits(Attention):
    """Without a `__call__` of its own."""


def random(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32))


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """(queries, keys) of each call of MLX's attention."""
    seen: list[tuple[int, int]] = []
    own = mx.fast.scaled_dot_product_attention

    def noting(queries, keys, values, **more):
        seen.append((queries.shape[2], keys.shape[2]))
        return own(queries, keys, values, **more)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noting)
    return seen


@pytest.mark.parametrize("kind", [Attention, Inherits])
@pytest.mark.parametrize("length", [257, 300, 512, 700])
def test_outputs_and_gradients_are_those_of_the_whole(calls, kind, length):
    arrays = random(2, 4, length, 8), random(2, 2, length, 8), random(2, 2, length, 8)
    cotangent = random(2, 4, length, 8)

    def of(module: nn.Module) -> tuple[mx.array, ...]:
        def total(*arrays: mx.array) -> mx.array:
            return (module(*arrays, "causal") * cotangent).sum()

        return module(*arrays, "causal"), *mx.grad(total, argnums=(0, 1, 2))(*arrays)

    whole, module = of(kind()), nn.Sequential(kind())
    calls.clear()
    attend_in_blocks(module)
    for found, expected in zip(of(module.layers[0]), whole, strict=True):
        # Sums of 700 terms in float32, in another order.
        assert mx.abs(found - expected).max() < 1e-5 * mx.abs(expected).max()
    assert len(calls) == 2 * -(-length // 256)
    assert all(queries <= 256 <= keys + queries for queries, keys in calls)


def test_what_is_not_causal_over_itself_is_left_alone(calls):
    """A mask of another form, a cache, other keys than queries, and short rows."""
    module = Attention()
    attend_in_blocks(module)
    long, short = random(1, 2, 600, 8), random(1, 2, 9, 8)
    mask = create_causal_mask(600, window_size=100)
    module(long, long, long, mask)
    module(long, long, long, None)
    module(short, long, long, "causal")
    module(short, short, short, "causal")
    module(long, long, long, "causal", cache=object())
    assert calls == [(600, 600), (600, 600), (9, 600), (9, 9), (600, 600)]


def test_a_model_attends_in_blocks_and_no_other_of_its_class(tmp_path, calls):
    model = load_base(write_llama(tmp_path / "model"), "fp32")
    other = load_base(tmp_path / "model", "fp32")
    attend_in_blocks(model)
    tokens = mx.arange(400)[None] % 64
    layers = len(model.layers)
    mx.eval(model(tokens))
    assert len(calls) == 2 * layers
    calls.clear()
    mx.eval(other(tokens))
    assert len(calls) == layers


@pytest.mark.skipif(sys.platform != "linux", reason="the memory of glibc")
def test_memory_stays_with_the_process_unless_the_user_has_a_say():
    """Page faults of a block of 64 MB that is freed and taken ten times."""
    code = """
import ctypes, resource
from vox_mlx.blas import keep_memory
keep_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    block = libc.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environ = {k: v for k, v in os.environ.items() if k[:7] not in ("MALLOC_", "GLIBC_T")}

    def faults(**said: str) -> int:
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env={**environ, **said}, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert 3 * faults() < faults(MALLOC_TRIM_THRESHOLD_="131072")

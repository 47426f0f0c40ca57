"""The torch backend on the CPU against the MLX and CUDA backends, number by number, in float32.

Every family that both know, with random weights of real architecture, and every method. What is
compared follows a run: the base, the start, twenty steps, what the optimizer keeps, the merge, the
answers. tolerances.py says how far the two may be apart, and why.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.parity import held, tolerances
from tests.parity.held import Trained, apart, distance
from vox_testing.tiny import FAMILIES, MIXTURES

METHODS = ("lora", "rslora", "dora")
against = pytest.mark.parametrize("backend", ["mlx", pytest.param("cuda", marks=pytest.mark.gpu)])
every = pytest.mark.parametrize("family", sorted([*FAMILIES, *MIXTURES]))
families = pytest.mark.parametrize("family", sorted(FAMILIES))
# rsLoRA is LoRA with another scale: one family says whether it is the right one. DoRA's first step
# is held for every family; twenty for those whose layers are of another kind than a Llama's.
APART = ("llama", "gpt2", "qwen3_5")
LORA = [(family, "lora") for family in sorted(MIXTURES)]
cases = pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[pytest.mark.long] * (family != "llama"))
        if method == "rslora"
        else (family, method)
        for family in sorted(FAMILIES)
        for method in METHODS
    ]
    + LORA,
)
curves = pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[pytest.mark.long] * (family not in shown))
        for family in sorted(FAMILIES)
        for method, shown in (("lora", FAMILIES), ("rslora", ["llama"]), ("dora", APART))
    ]
    + LORA,
)

ROUTERS = {
    "glm4_moe": "mlp.gate",
    "granitemoe": "block_sparse_moe.router",
    "mixtral": "mlp.gate",
    "qwen2_moe": "mlp.gate",
}
"""In the words of transformers' modules."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@functools.cache
def trained(root: Path, family: str, method: str, backend: str) -> Trained:
    return held.train(backend, held.model(root, family), method=method)


@functools.cache
def first_step(root: Path, family: str, method: str, backend: str) -> dict[str, object]:
    """The gradients of the first step, by name.

    Without clipping the first moment is (1 - beta1) times the gradient. B starts at zero, and then
    A's gradient is zero; so both start from an adapter with an effect.
    """
    folder = held.model(root, family)
    plan = held.jobs.plan(folder, method=method, clip=0.0)
    start = held.jobs.stirred(held.jobs.start(folder, plan))
    steps = held.jobs.curve(1, groups=2)
    state = held.go_on(backend, folder, start, steps, method=method, clip=0.0).state
    return {name: first / 0.1 for name, (first, _) in state.moments.items()}


@against
@every
def test_the_bases_logits(root, family, backend):
    folder = held.model(root, family)
    assert apart(held.logits(backend, folder), held.logits("cpu", folder)) < tolerances.LOGITS


@against
@cases
def test_the_adapters_logits(root, family, method, backend):
    folder = held.model(root, family)
    state = held.adapter(folder, method)
    mine, other = held.logits(backend, folder, state), held.logits("cpu", folder, state)
    assert apart(mine, other) < tolerances.LOGITS
    assert apart(mine, held.logits(backend, folder)) > 100 * tolerances.LOGITS


@against
@curves
def test_the_loss_at_each_of_twenty_steps(root, family, method, backend):
    mine, other = (trained(root, family, method, each) for each in (backend, "cpu"))
    assert len(mine.losses) == held.STEPS
    assert mine.losses == pytest.approx(other.losses, rel=tolerances.LOSS)
    assert mine.norms == pytest.approx(other.norms, rel=tolerances.GRADIENT_NORM)


@against
@cases
def test_the_gradients_of_a_and_b_at_the_first_step(root, family, method, backend):
    mine, other = (first_step(root, family, method, each) for each in (backend, "cpu"))
    for kind in ("lora_A", "lora_B", "magnitude") if method == "dora" else ("lora_A", "lora_B"):
        some = {name: value for name, value in mine.items() if kind in name}
        assert some
        assert distance(some, {name: other[name] for name in some}) < tolerances.GRADIENT


@against
@curves
def test_the_moments_and_the_adapter_after_twenty_steps(root, family, method, backend):
    mine, other = (trained(root, family, method, each).state for each in (backend, "cpu"))
    assert mine.step == other.step == held.STEPS
    assert mine.moments.keys() == other.moments.keys() == mine.adapter.tensors().keys()
    for index in (0, 1):
        kept = [{n: m[index] for n, m in state.moments.items()} for state in (mine, other)]
        assert distance(*kept) < tolerances.MOMENTS[backend]
    assert distance(mine.adapter.tensors(), other.adapter.tensors()) < tolerances.ADAPTER


@against
@families
def test_every_weight_after_twenty_steps(root, family, backend):
    """Weights start far from zero, so their change is compared. Where a gradient is zero but for
    roundoff, as that of a key's bias, Adam moves the weight by the noise: of gpt2, 0.4 % of all."""
    mine, other = (trained(root, family, "full", each) for each in (backend, "cpu"))
    assert mine.losses == pytest.approx(other.losses, rel=tolerances.LOSS)
    assert mine.norms == pytest.approx(other.norms, rel=tolerances.GRADIENT_NORM)
    for index in (0, 1):
        kept = [{n: m[index] for n, m in each.state.moments.items()} for each in (mine, other)]
        assert distance(*kept) < tolerances.MOMENTS[backend]
    folder = held.model(root, family)
    begin = held.jobs.start(folder, held.jobs.plan(folder, method="full")).adapter.tensors()
    changes = [
        {name: value - begin[name] for name, value in each.state.adapter.tensors().items()}
        for each in (mine, other)
    ]
    assert distance(*changes) < 10 * tolerances.ADAPTER


@against
@cases
def test_the_merged_weights(root, family, method, backend):
    folder = held.model(root, family)
    state = held.adapter(folder, method)
    mine, other = held.merged(backend, folder, state), held.merged("cpu", folder, state)
    assert list(mine) == list(other)
    for name, tensor in mine.items():
        assert apart(tensor, other[name]) < tolerances.MERGED, name


@against
@pytest.mark.parametrize(("family", "router"), ROUTERS.items())
def test_the_loss_while_a_router_learns(root, family, router, backend):
    folder, saved = held.model(root, family), (f"model.layers.1.{router}",)
    mine, other = (held.train(b, folder, 5, modules_to_save=saved) for b in (backend, "cpu"))
    assert mine.losses == pytest.approx(other.losses, rel=tolerances.LOSS)
    assert mine.losses != pytest.approx(held.train(backend, folder, 5).losses, rel=1e-4)


@against
@every
def test_greedy_generation_token_by_token(root, family, backend):
    folder = held.model(root, family)
    state = held.adapter(folder, "lora")
    mine = held.greedy(backend, folder, state)
    assert len(mine) == 24
    assert mine == held.greedy("cpu", folder, state)

"""Norm, gate and rotary positions as autograd functions, and where they take a module's place."""

from __future__ import annotations

import copy

import pytest
import torch
from libs.vox_torch.tests.jobs import batch, documents, plan, start
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)

from vox_core.testing.tiny import FAMILIES
from vox_torch.base import load_base
from vox_torch.elementwise import Gated, RmsNorm, Rotary
from vox_torch.inject import attach
from vox_torch.lora import fuse
from vox_torch.swap import swap
from vox_torch.trial import loss_of

WAYS = {"llama": (LlamaRMSNorm, True, 0.0), "gemma": (Gemma3RMSNorm, False, 1.0)}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("late", [True, False])
def test_the_gradient_of_a_norm_is_that_of_finite_differences(late):
    weight = torch.randn(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: RmsNorm.apply(x, weight, 1e-3, late), random(2, 3, 6))


@pytest.mark.parametrize("tanh", [True, False])
def test_the_gradients_of_a_gate_are_those_of_finite_differences(tanh):
    pair = (random(3, 5), random(3, 5))
    assert torch.autograd.gradcheck(lambda gate, up: Gated.apply(gate, up, tanh), pair)


def test_the_gradient_of_rotary_positions_is_that_of_finite_differences():
    # Of two halves that differ, as some families scale them.
    cos, sin = torch.randn(2, 1, 1, 4, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: Rotary.apply(x, cos, sin), random(1, 2, 4, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", WAYS)
def test_a_norm_is_transformers(family, dtype):
    """Also of more rows than are computed at once, and of rows in three dimensions."""
    kind, late, offset = WAYS[family]
    module = kind(1024, eps=1e-5).to(dtype)
    module.weight.data.normal_(1 - offset, 0.2)
    x = torch.randn(2, 300, 1024).to(dtype).requires_grad_()
    gradient = torch.randn(2, 300, 1024).to(dtype)
    weight = module.weight.detach() if late else offset + module.weight.detach().float()
    made = []
    for y in (RmsNorm.apply(x, weight, 1e-5, late), module(x)):
        made.append((y.detach().float(), torch.autograd.grad(y, x, gradient)[0].float()))
    # Roundings in another order: two or three of them a number.
    for found, expected in zip(*made, strict=True):
        assert (found - expected).norm() < 2 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_are_transformers(dtype):
    angle = torch.randn(1, 7, 8).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    x = torch.randn(1, 7, 3, 16).to(dtype).transpose(1, 2).requires_grad_()
    gradient = torch.randn(1, 3, 7, 16).to(dtype)
    made = []
    for y in (Rotary.apply(x, cos[:, None], sin[:, None]), apply_rotary_pos_emb(x, x, cos, sin)[0]):
        made.append((y.detach().float(), torch.autograd.grad(y, x, gradient)[0].float()))
    for found, expected in zip(*made, strict=True):
        assert (found - expected).norm() < torch.finfo(dtype).eps * expected.norm()


# What of each family's two layers is taken; the others have something of their own there.
TAKEN = {
    "llama": (5, 2, 2),
    "mistral": (5, 2, 2),
    "qwen2": (5, 2, 2),
    "qwen3": (9, 2, 2),
    "qwen3_5": (11, 4, 1),
    "gemma3": (13, 2, 2),
    "gpt2": (0, 0, 0),
    "phi3": (5, 0, 2),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_near_to_float64_with_and_without(tiny, family):
    folder, some = tiny(family), batch(documents(3, longest=60))

    def of(dtype: str, taken: dict[str, int] | None = None) -> tuple[float, torch.Tensor]:
        adapted = attach(load_base(folder, dtype, "cpu"), start(folder, plan(folder)).adapter)
        fuse(adapted.model)
        if taken is not None:
            taken.update(swap(adapted.model, adapted.model.dtype, "cpu"))
        loss = loss_of(adapted.model, "cpu")[0](some)
        gradients = torch.autograd.grad(loss, list(adapted.parameters.values()))
        return loss.item(), torch.cat([each.flatten().double() for each in gradients])

    taken: dict[str, int] = {}
    (loss, gradient), (own_loss, own), (exact_loss, exact) = (
        of("fp32", taken),
        of("fp32"),
        of("fp64"),
    )
    assert tuple(taken.values()) == TAKEN[family]
    assert loss == pytest.approx(exact_loss, rel=max(1e-6, 2 * abs(own_loss / exact_loss - 1)))
    # A recurrent state makes 3e-5 of float32's roundoff, the others 1e-6.
    assert (gradient - exact).norm() < 2 * (own - exact).norm() + 1e-6 * exact.norm()


class _Twice(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 1.001 * super().forward(hidden_states)


class _NoEpsilon(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * hidden_states.square().mean(-1, keepdim=True).rsqrt() * self.weight


class _Asks(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) * gate


class _MayBeGiven(LlamaRMSNorm):
    def forward(
        self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None
    ) -> torch.Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


@pytest.mark.parametrize("kind", [_Twice, _NoEpsilon, _Asks, _MayBeGiven])
def test_what_computes_something_else_keeps_its_own(kind):
    module = kind(16).requires_grad_(False)
    assert swap(nn.Sequential(module), torch.float32, "cpu")["norms"] == 0
    assert "forward" not in vars(module)


class _Clamped(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=10.0)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))


class _ClampedInside(LlamaMLP):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.act_fn = nn.Sequential(nn.Hardtanh(-1e9, 10.0), nn.SiLU())


@pytest.mark.parametrize(("kind", "taken"), [(LlamaMLP, 1), (_Clamped, 0), (_ClampedInside, 0)])
def test_a_feed_forward_that_clamps_keeps_its_own(kind, taken):
    """Where numbers are small as well: the limit is far from them."""
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2)
    for pair in ((LlamaMLP, kind), (kind, LlamaMLP)):
        model = nn.Sequential(*(each(config) for each in pair)).requires_grad_(False)
        assert swap(model, torch.float32, "cpu")["feed-forwards"] == 1 + taken


@pytest.mark.parametrize(
    ("known", "other"), [("silu", "quick_gelu"), ("gelu_pytorch_tanh", "relu")]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_feed_forward_with_another_activation_keeps_its_own(dtype, known, other):
    """In half precision the two look alike."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    for names in ((known, other), (other, known)):
        modules = [LlamaMLP(LlamaConfig(**sizes, hidden_act=name)) for name in names]
        model = nn.Sequential(*modules).to(dtype).requires_grad_(False)
        assert swap(model, dtype, "cpu")["feed-forwards"] == 1


def test_a_quantised_feed_forward_without_an_adapter_is_swapped(tiny):
    """It has no parameter at all."""
    folder = tiny("llama")
    model = load_base(folder, "fp32", "cpu", "nf4")
    attach(model, start(folder, plan(folder, targets=("q_proj",))).adapter)
    assert swap(model, torch.float32, "cpu")["feed-forwards"] == 2


def test_dropout_changes_nothing_of_what_is_swapped(tiny):
    folder = tiny("llama")
    begun = start(folder, plan(folder, dropout=0.5)).adapter
    for module in begun.modules.values():
        module.B_OR[:] = 1
    adapted = attach(load_base(folder, "fp32", "cpu"), begun, 0.5)
    assert swap(adapted.model, torch.float32, "cpu")["feed-forwards"] == 2


def test_what_is_trained_keeps_its_own():
    assert swap(nn.Sequential(LlamaRMSNorm(16)), torch.float32, "cpu")["norms"] == 0


def test_no_other_model_of_the_class_notices(tiny):
    model = load_base(tiny("llama"), "fp32", "cpu")
    other = copy.deepcopy(model)
    swap(model, torch.float32, "cpu")
    assert not any("forward" in vars(module) for module in other.modules())
    attention = type(model.model.layers[0].self_attn)
    assert attention.forward.__globals__["apply_rotary_pos_emb"] is apply_rotary_pos_emb

"""Norm and gate as autograd functions, and the modules of transformers that they replace."""

from __future__ import annotations

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch
from libs.vox_torch.tests.jobs import batch, documents, plan, start
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from vox_testing.float64 import compute_in_float64
from vox_testing.tiny import FAMILIES
from vox_torch import fused_modules
from vox_torch.base import load_base
from vox_torch.fused_modules import FusedNorm, Gated, RmsNorm, fuse_modules
from vox_torch.inject import attach
from vox_torch.lora import fuse
from vox_torch.trial import loss_of

NORMS = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "granite": "Granite",
    "smollm3": "SmolLM3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "qwen3_5": "Qwen3_5",
}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def of_transformers(family: str, kind: str) -> type[nn.Module]:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    found: type[nn.Module] = getattr(module, f"{NORMS[family]}{kind}")
    return found


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("late", [True, False])
def test_the_gradients_of_a_norm_are_those_of_finite_differences(late):
    """Of its input and its weight."""
    pair = (random(2, 3, 6), random(6))
    assert torch.autograd.gradcheck(lambda x, weight: RmsNorm.apply(x, weight, 1e-3, late), pair)


@pytest.mark.parametrize("tanh", [True, False])
def test_the_gradients_of_a_gate_are_those_of_finite_differences(tanh):
    pair = (random(3, 5), random(3, 5))
    assert torch.autograd.gradcheck(lambda gate, up: Gated.apply(gate, up, tanh), pair)


# --- each entry of the table against the original -------------------------------------------------


def outputs_and_gradients(
    modules: list[nn.Module], x: torch.Tensor, gradient: torch.Tensor
) -> list[list[torch.Tensor]]:
    made = []
    for module in modules:
        y = module(x)
        made.append([y.detach().float(), torch.autograd.grad(y, x, gradient)[0].float()])
    return made


class _Elsewhere(torch.Tensor):
    """A tensor that says it is on an accelerator."""

    is_cpu = False


@pytest.mark.parametrize("kind", [torch.Tensor, _Elsewhere])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", NORMS)
def test_a_norm_is_that_of_transformers(family, dtype, kind):
    """With weights as Gemma 3 has them, from -1 to 590: one of them is larger than all else in a
    row, and every number has to be right beside it. More rows than are computed at once."""
    own = of_transformers(family, "RMSNorm")(1024, eps=1e-5).to(dtype)
    own.weight.data.normal_(1, 4)
    own.weight.data[:3] = torch.tensor([590.0, -1.0, 0.0])
    model = nn.Sequential(copy.deepcopy(own)).requires_grad_(False)
    assert fuse_modules(model)["norms"] == 1
    x = torch.randn(2, 300, 1024)
    x[0, 0] *= 1e-3  # where epsilon shows
    gradient = torch.randn(2, 300, 1024).to(dtype)
    (found, found_x), (y, y_x) = outputs_and_gradients(
        [model[0], own], x.to(dtype).as_subclass(kind).requires_grad_(), gradient
    )
    # Two roundings each in another order, of each number itself, and a sum of 1024 in float32.
    numbers = torch.finfo(dtype)
    relative = 3 * numbers.eps + 16 * torch.finfo(torch.float32).eps
    assert ((found - y).abs() <= relative * y.abs() + numbers.smallest_normal).all()
    assert (found_x - y_x).norm() < relative * y_x.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", sorted(NORMS.keys() - {"phi3"}))
def test_a_feed_forward_is_that_of_transformers(family, dtype):
    """For large gates, too: 100 is where their square still fits in float16."""
    act = "gelu_pytorch_tanh" if family.startswith("gemma") else "silu"
    config = SimpleNamespace(**SIZES, mlp_bias=False, hidden_act=act, hidden_activation=act)
    kind = of_transformers(family, "MLP")
    own = kind(config, 32) if family == "qwen3_5" else kind(config)
    own = own.requires_grad_(False).to(dtype)
    model = nn.Sequential(copy.deepcopy(own))
    assert fuse_modules(model)["feed-forwards"] == 1
    x = torch.randn(64, 16) * torch.logspace(0, 2, 64)[:, None]
    made = outputs_and_gradients(
        [model[0], own], x.to(dtype).requires_grad_(), torch.randn(64, 16).to(dtype)
    )
    for found, expected in zip(*made, strict=True):
        errors_X = (found - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors_X.max() < 4 * torch.finfo(dtype).eps


class Adapted(nn.Module):
    """A feed-forward of 64 x 16 -> 32 -> 16 with adapters, fused."""

    def __init__(self, *targets: str) -> None:
        super().__init__()
        config = LlamaConfig(**SIZES)
        lora = LoraConfig(r=4, target_modules=list(targets))
        self.model = get_peft_model(nn.Sequential(LlamaMLP(config)), lora)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter)
        assert set(fuse(self.model).values()) == {None}
        assert fuse_modules(self.model)["feed-forwards"] == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.base_model.model(x)


@pytest.mark.parametrize(
    ("targets", "gradient", "counts"),
    [
        (["gate_proj", "up_proj", "down_proj"], True, (2, 3)),
        (["down_proj"], True, (2, 3)),
        (["down_proj"], False, (1, 1)),  # a first layer, whose gate keeps nothing
    ],
)
def test_the_adapter_after_a_gate_recomputes_its_input(monkeypatch, targets, gradient, counts):
    """To the bit, and keeps gate and up alone, which the gate keeps as well."""
    model, x = Adapted(*targets), torch.randn(64, 16, requires_grad=gradient)

    def run() -> tuple[int, list[torch.Tensor]]:
        wide = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() == 64 * 32:
                wide[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
            y = model(x)
        trained = [each for each in (x, *model.parameters()) if each.requires_grad]
        return len(wide), [y, *torch.autograd.grad(y.square().sum(), trained)]

    kept, found = run()
    monkeypatch.setattr(fused_modules, "recomputing", lambda layer, x, *_: layer(x))
    kept_before, expected = run()
    assert (kept, kept_before) == counts
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nothing_of_a_checkpointed_layer_is_kept():
    """Gradient checkpointing drops gate and up; a function that held them would not let it."""
    model = Adapted("gate_proj", "up_proj", "down_proj")
    x, made = torch.randn(64, 16, requires_grad=True), []
    for name, module in model.named_modules():
        if name.endswith(("gate_proj", "up_proj")):
            module.register_forward_hook(
                lambda _module, _args, y: made.append(StorageWeakRef(y.untyped_storage()))
            )
    y = checkpoint(model, x, use_reentrant=False)
    assert [each.expired() for each in made] == [True, True]
    y.sum().backward()
    assert x.grad is not None


def test_a_weight_for_another_family_would_be_seen():
    """The norm of Llama with the weights of Gemma, as bfloat16 once took it for the same: the
    error of most numbers was small beside the largest one of the row."""
    own = of_transformers("gemma3", "RMSNorm")(1024, eps=1e-5).bfloat16().requires_grad_(False)
    own.weight.data.normal_(0, 1)
    own.weight.data[0] = 590
    wrong = FusedNorm(own, centred=True)
    wrong.centred = False
    x = torch.randn(3, 1024).bfloat16()
    apart = (wrong(x).float() - own(x).float()).abs()
    assert (apart < 4 * torch.finfo(torch.bfloat16).eps * own(x).float().abs().amax()).all()
    assert (apart > 3 * torch.finfo(torch.bfloat16).eps * own(x).float().abs()).float().mean() > 0.9


# Norms and feed-forwards of each family's two layers (of four, for qwen3_5) that are fused.
FUSED = {
    "llama": (5, 2),
    "mistral": (5, 2),
    "qwen2": (5, 2),
    "qwen3": (9, 2),
    "qwen3_5": (11, 4),
    "gemma3": (13, 2),
    "gpt2": (0, 0),
    "phi3": (5, 0),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_as_near_to_float64_with_and_without(tiny, family):
    folder, some = tiny(family), batch(documents(3, longest=60))

    def of(
        fused: dict[str, int] | None = None, *, exactly: bool = False
    ) -> tuple[float, torch.Tensor]:
        base = load_base(folder, "fp32", "cpu")
        if exactly:
            compute_in_float64(base)
        adapted = attach(base, start(folder, plan(folder)).adapter)
        fuse(adapted.model)
        if fused is not None:
            fused.update(fuse_modules(adapted.model))
        loss, _ = loss_of(adapted.model, "cpu")[0](some)
        gradients = torch.autograd.grad(loss, list(adapted.parameters.values()))
        return loss.item(), torch.cat([each.flatten().double() for each in gradients])

    fused: dict[str, int] = {}
    (loss, gradient), (own_loss, own), (exact_loss, exact) = (
        of(fused),
        of(),
        of(exactly=True),
    )
    assert tuple(fused.values()) == FUSED[family]
    assert loss == pytest.approx(exact_loss, rel=max(1e-6, 2 * abs(own_loss / exact_loss - 1)))
    # A recurrent state makes 3e-5 of float32's roundoff, the others 1e-6.
    assert (gradient - exact).norm() < 2 * (own - exact).norm() + 1e-6 * exact.norm()


# --- what keeps its own forward -------------------------------------------------------------------


class _Sub(LlamaRMSNorm):
    """A class that the table does not name, whatever it computes."""


@pytest.mark.parametrize(
    "module",
    [
        _Sub(16).requires_grad_(False),
        nn.RMSNorm(16).requires_grad_(False),
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="relu")).requires_grad_(False),
        LlamaMLP(LlamaConfig(**SIZES, hidden_act="quick_gelu")).requires_grad_(False),
    ],
    ids=["a subclass", "torch's", "relu", "quick_gelu"],
)
def test_what_is_not_in_the_table_keeps_its_own_forward(module):
    model = nn.Sequential(module)
    assert fuse_modules(model) == {"norms": 0, "feed-forwards": 0}
    assert model[0] is module


def test_a_quantised_feed_forward_without_an_adapter_is_fused(tiny):
    """It has no parameter at all."""
    folder = tiny("llama")
    model = load_base(folder, "fp32", "cpu", "nf4")
    attach(model, start(folder, plan(folder, targets=("q_proj",))).adapter)
    assert fuse_modules(model)["feed-forwards"] == 2


def test_parameters_keep_their_names(tiny):
    model = load_base(tiny("gemma3"), "fp32", "cpu")
    before = dict(model.named_parameters())
    fuse_modules(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {
        name: id(p) for name, p in before.items()
    }


def test_other_models_of_the_class_do_not_change(tiny):
    model = load_base(tiny("llama"), "fp32", "cpu")
    other = copy.deepcopy(model)
    fuse_modules(model)
    assert type(other.model.norm) is LlamaRMSNorm

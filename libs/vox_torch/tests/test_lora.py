"""What half precision leaves of an adapter."""

from __future__ import annotations

import pytest
import torch

from vox_torch.functions import LoraLinear
from vox_torch.lora_rows import RowAdapters

WIDE, TOKENS, RANK = 256, 64, 8


def kept(found: torch.Tensor, base: torch.Tensor, part: torch.Tensor) -> float:
    """How much of `part`, which was added to `base`, is in `found`: least squares."""
    there = ((found.detach().double() - base) * part).sum()
    return (there / part.square().sum()).item()


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_updates_are_not_rounded_away(dtype: torch.dtype, bias: bool, device: str) -> None:
    """An update of a tenth of the last bit: of what is added to a rounded number, a third is left.
    Rounding once leaves it with an error of 0.02 (a fifth of a bit each, over 16,384 numbers)."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x_XI = random(TOKENS, WIDE).requires_grad_()
    W_OI, A_RI = random(WIDE, WIDE) / 16, (random(RANK, WIDE) / 16).requires_grad_()
    size = torch.finfo(dtype).eps / 64
    B_OR = (random(WIDE, RANK) * size).requires_grad_()
    bias_O = random(WIDE) if bias else None

    y_XO = LoraLinear.apply(x_XI, A_RI, B_OR, lambda: W_OI, bias_O, 2.0)
    g_XO = random(TOKENS, WIDE)
    y_XO.backward(g_XO)

    x, W, A, B, g = (each.detach().double() for each in (x_XI, W_OI, A_RI, B_OR, g_XO))
    base_XO = x @ W.T + (0 if bias_O is None else bias_O.double())
    assert kept(y_XO, base_XO, 2 * (x @ A.T) @ B.T) > 0.9
    assert kept(x_XI.grad, g @ W, 2 * (g @ B) @ A) > 0.9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nor_are_they_in_a_decoding_step(dtype: torch.dtype, bias: bool, device: str) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE, bias=bias)).to(device, dtype)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["0"])
    model = get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    layer = model.base_model.model[0]
    W_OI, A_RI = layer.base_layer.weight, layer.lora_A["default"].weight
    B_OR = layer.lora_B["default"].weight
    torch.nn.init.normal_(B_OR, std=torch.finfo(dtype).eps / 64)
    adapters = RowAdapters(model)

    x_XI = torch.randn(TOKENS, WIDE, device=device, dtype=dtype)
    with torch.inference_mode(), adapters.computing([("default", 1)]):
        y_XO = torch.cat([model(x_1I) for x_1I in x_XI[:, None]])
    x, W, A, B = (each.detach().double() for each in (x_XI, W_OI, A_RI, B_OR))
    base_XO = x @ W.T + (layer.base_layer.bias.detach().double() if bias else 0)
    assert kept(y_XO, base_XO, 2 * (x @ A.T) @ B.T) > 0.9


@pytest.mark.parametrize("sources", [1, 2])
def test_gradients_of_gradients_are_those_of_finite_differences(sources: int) -> None:
    """Also where the backward pass makes x again."""
    torch.manual_seed(0)
    W_OI, *given = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 4), (2, 4), (3, 2), *[(5, 4)] * sources)
    )

    def output(A_RI: torch.Tensor, B_OR: torch.Tensor, *xs: torch.Tensor) -> torch.Tensor:
        made = (torch.mul, *xs) if len(xs) > 1 else ()
        x_XI = torch.mul(*xs) if made else xs[0]
        y: torch.Tensor = LoraLinear.apply(x_XI, A_RI, B_OR, W_OI.detach, None, 2.0, *made)
        return y

    assert torch.autograd.gradcheck(output, given)
    assert torch.autograd.gradgradcheck(output, given)

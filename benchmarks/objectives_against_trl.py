"""Losses and gradients of vox's objectives against TRL 1.16's own loss functions.

    python3 -m venv ENV
    ENV/bin/pip install -c constraints.txt torch==2.13.0 trl==1.16 peft pluggy pydantic
    PYTHONPATH=.:plugins/vox_objectives ENV/bin/python benchmarks/objectives_against_trl.py

TRL's trainers compute losses from a model's outputs: log-probabilities, for CPO and ORPO logits.
The model is a stand-in whose outputs are random numbers, the same in each run. Loss and gradient
with respect to these numbers are compared on ten batches with what `weigh` returns. Exits with 1 if
a difference is more than 1e-5 of the loss, or of the gradient's largest element.

No trainer of TRL 1.16 has PPO; its GRPO computes the clipped objective with given advantages.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RLOOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.iw_opd import IWOPDTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import nanstd

from vox_core.contract import Group, ObjectiveSpec, Side, Totals, Weighed
from vox_objectives import vox_objective

BATCHES = 10
TOLERANCE = 1e-5  # weights are float32, and so are parts of TRL's losses: 6e-8 of their size
PAIRS, GENERATIONS, LONGEST, VOCABULARY = 5, 4, 12, 13


@dataclass
class Batch:
    """Documents of a step, padded: B documents of at most T trained positions.

    Args:
        log_probs_BT: 0 where there is no token; leaf of the gradient.
    """

    log_probs_BT: torch.Tensor
    reference_BT: torch.Tensor
    sampled_BT: torch.Tensor
    mask_BT: torch.Tensor
    rewards_B: torch.Tensor

    def sides(self, labels: Sequence[str]) -> list[Side]:
        lengths = self.mask_BT.sum(1).tolist()
        return [
            Side(
                label,
                *(
                    values_BT[index, : lengths[index]].detach().numpy()
                    for values_BT in (self.log_probs_BT, self.reference_BT, self.sampled_BT)
                ),
                float(self.rewards_B[index]),
            )
            for index, label in enumerate(labels)
        ]


def batch_of(seed: int, documents: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(1, LONGEST + 1, (documents,), generator=draw)
    mask_BT = (torch.arange(LONGEST) < lengths_B[:, None]).long()
    shape = documents, LONGEST
    log_probs_BT = -3 * torch.rand(shape, generator=draw, dtype=torch.float64) - 0.05
    reference_BT = log_probs_BT + 0.4 * torch.randn(shape, generator=draw, dtype=torch.float64)
    sampled_BT = log_probs_BT + 0.15 * torch.randn(shape, generator=draw, dtype=torch.float64)
    log_probs_BT, reference_BT, sampled_BT = (
        each * mask_BT for each in (log_probs_BT, reference_BT, sampled_BT)
    )
    rewards_B = torch.randn(documents, generator=draw, dtype=torch.float64)
    return Batch(log_probs_BT.requires_grad_(), reference_BT, sampled_BT, mask_BT, rewards_B)


def totals_of(groups: Sequence[Group]) -> Totals:
    documents, tokens = Counter[str](), Counter[str]()
    for group in groups:
        for side in group:
            documents[side.label] += 1
            tokens[side.label] += len(side.log_probs_K)
    return Totals(len(groups), documents, tokens)


def weigh(name: str, options: dict[str, str], groups: Sequence[Group]) -> Weighed:
    return vox_objective(ObjectiveSpec(name, options)).weigh(groups, totals_of(groups))


def trainer(kind: type[Any], **attributes: Any) -> Any:
    """A trainer of TRL with the attributes that its loss reads, and nothing else."""
    made = object.__new__(kind)

    def same(value: Any) -> Any:
        return value

    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        gather=same,
        gather_for_metrics=same,
        reduce=lambda value, reduction: value,
    )
    made.__dict__.update(
        accelerator=accelerator,
        aux_loss_enabled=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        _peft_has_been_casted_to_bf16=False,
        model=SimpleNamespace(training=True),
        **attributes,
    )
    return made


def model_of(batch: Batch) -> Any:
    """A model whose fused head gives a batch's log-probabilities."""
    zeros_BT = torch.zeros_like(batch.log_probs_BT)
    log_probs_BT = batch.log_probs_BT * batch.mask_BT
    outputs = SimpleNamespace(
        log_probs=log_probs_BT, entropy=zeros_BT, mean_logits=zeros_BT, is_top1=zeros_BT.bool()
    )
    return lambda **_: outputs


def with_prompt(mask_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    """Inputs with a prompt of one token."""
    before_B1 = torch.ones(len(mask_BT), 1, dtype=torch.long)
    mask = torch.cat([before_B1, mask_BT], 1)
    return {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": mask,
        "completion_mask": torch.cat([0 * before_B1, mask_BT], 1),
    }


# --- the comparisons: each returns TRL's loss and gradient, and vox's -----------------------------

Found = tuple[float, torch.Tensor, float, torch.Tensor]


def gradient_of(weighed: Weighed, shape: torch.Size) -> torch.Tensor:
    """The gradient (B, T) of weights, their documents in order."""
    gradient_BT = torch.zeros(shape, dtype=torch.float64)
    for index, weights_K in enumerate(w for group in weighed.weights for w in group):
        gradient_BT[index, : len(weights_K)] = -torch.from_numpy(weights_K).double()
    return gradient_BT


def dpo(options: dict[str, str], seed: int) -> Found:
    batch = batch_of(seed, 2 * PAIRS)
    sides = batch.sides(["chosen"] * PAIRS + ["rejected"] * PAIRS)
    weighed = weigh("dpo", options, list(zip(sides[:PAIRS], sides[PAIRS:], strict=True)))
    beta, smoothing = float(options["beta"]), float(options.get("label_smoothing", 0))
    if options["loss_type"] == "sigmoid" and smoothing:  # DPOTrainer ignores it
        settings = {"loss_type": "sigmoid", "alpha": 0.0, "label_smoothing": smoothing}
        ratios_B = ((batch.log_probs_BT - batch.reference_BT) * batch.mask_BT).sum(1)
        losses, *_ = trainer(CPOTrainer, beta=beta, **settings).cpo_loss(*ratios_B.chunk(2))
        loss = losses.mean()
    else:
        made = trainer(
            DPOTrainer,
            loss_types=[options["loss_type"]],
            loss_weights=[1.0],
            beta=beta,
            label_smoothing=smoothing,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            use_weighting=False,
        )
        chosen_B, rejected_B = batch.reference_BT.sum(1).chunk(2)
        inputs = with_prompt(batch.mask_BT)
        inputs |= {"ref_chosen_logps": chosen_B, "ref_rejected_logps": rejected_B}
        loss = made._compute_loss(model_of(batch), inputs, False)
    loss.backward()
    in_order = [pair[side] for side in (0, 1) for pair in weighed.weights]
    mine = gradient_of(Weighed(0, [in_order]), batch.mask_BT.shape)
    return loss.item(), batch.log_probs_BT.grad, weighed.loss, mine


def kto(options: dict[str, str], seed: int) -> Found:
    batch, mismatched = batch_of(seed, 2 * PAIRS), batch_of(seed + 100, 2 * PAIRS)
    labels_B = torch.arange(2 * PAIRS) % 3 != 0
    sides = batch.sides(["chosen" if good else "rejected" for good in labels_B])
    # Half of the batches have a policy above the reference, and so a KL above 0.
    mismatched.reference_BT -= 0.3 * (seed % 2) * mismatched.mask_BT
    groups = list(zip(sides, mismatched.sides(["kl"] * len(sides)), strict=True))
    weighed = weigh("kto", options, groups)
    made = trainer(
        KTOTrainer,
        loss_type=options.get("loss_type", "kto"),
        calculate_KL="loss_type" not in options,
        beta=float(options["beta"]),
        desirable_weight=float(options["desirable_weight"]),
        undesirable_weight=float(options["undesirable_weight"]),
        precompute_ref_logps=True,
        _compute_kl_logps=lambda model, batch: mismatched.log_probs_BT.sum(1),
    )
    inputs = with_prompt(batch.mask_BT)
    inputs |= {
        "label": labels_B,
        "ref_logps": batch.reference_BT.sum(1),
        "ref_KL_logps": mismatched.reference_BT.sum(1),
    }
    loss = made._compute_loss(model_of(batch), inputs, False)
    loss.backward()
    mine = gradient_of(Weighed(0, [[group[0] for group in weighed.weights]]), batch.mask_BT.shape)
    return loss.item(), batch.log_probs_BT.grad, weighed.loss, mine


def from_logits(kind: type[Any], name: str, options: dict[str, str], **settings: Any) -> Callable:
    """CPO and ORPO compute log-probabilities themselves: the gradient is that of the logits."""

    def compare(_: dict[str, str], seed: int) -> Found:
        draw = torch.Generator().manual_seed(seed)
        lengths_B = torch.randint(1, LONGEST + 1, (2 * PAIRS,), generator=draw)
        tokens_BT = torch.randint(VOCABULARY, (2 * PAIRS, LONGEST + 1), generator=draw)
        logits_BTV = torch.randn(
            2 * PAIRS, LONGEST + 1, VOCABULARY, generator=draw, dtype=torch.float64
        ).requires_grad_()
        mask_BT = (torch.arange(LONGEST + 1) <= lengths_B[:, None]).long()
        labels_BT = tokens_BT.masked_fill(mask_BT == 0, -100)
        labels_BT[:, 0] = -100  # the prompt, one token: TRL's ORPO trains longer ones
        batch = {}
        for index, side in enumerate(("chosen", "rejected")):
            batch[f"{side}_input_ids"] = tokens_BT.chunk(2)[index]
            batch[f"{side}_attention_mask"] = mask_BT.chunk(2)[index]
            batch[f"{side}_labels"] = labels_BT.chunk(2)[index]
        made = trainer(
            kind, beta=float(options["beta"]), is_encoder_decoder=False, pad_token_id=0, **settings
        )
        made.padding_value = 0
        loss, _ = made.get_batch_loss_metrics(
            lambda *_, **__: SimpleNamespace(logits=logits_BTV), batch
        )
        loss.backward()
        theirs = logits_BTV.grad.clone()

        log_probs_BT = logits_BTV[:, :-1].log_softmax(-1)
        log_probs_BT = log_probs_BT.gather(2, tokens_BT[:, 1:, None]).squeeze(2)
        sides = [
            Side("chosen" if index < PAIRS else "rejected", values_T[:length].detach().numpy())
            for index, (values_T, length) in enumerate(zip(log_probs_BT, lengths_B, strict=True))
        ]
        weighed = weigh(name, options, list(zip(sides[:PAIRS], sides[PAIRS:], strict=True)))
        in_order = [pair[side] for side in (0, 1) for pair in weighed.weights]
        slope_BT = gradient_of(Weighed(0, [in_order]), log_probs_BT.shape)
        logits_BTV.grad = None
        (slope_BT * log_probs_BT).sum().backward()
        return loss.item(), theirs, weighed.loss, logits_BTV.grad

    return compare


def rollouts_of(seed: int, size: int) -> tuple[Batch, list[list[Side]]]:
    batch = batch_of(seed, PAIRS * size)
    sides = batch.sides(["rollout"] * PAIRS * size)
    return batch, [sides[start : start + size] for start in range(0, len(sides), size)]


def advantages_of(rewards_B: torch.Tensor, options: dict[str, str]) -> torch.Tensor:
    """As in GRPOTrainer and RLOOTrainer, where they are computed within generation."""
    rewards_GN = rewards_B.view(-1, GENERATIONS)
    if options["loss_type"] == "rloo":
        baseline_GN = (rewards_GN.sum(1, keepdim=True) - rewards_GN) / (GENERATIONS - 1)
        return (rewards_GN - baseline_GN).flatten()
    advantages_GN = rewards_GN - rewards_GN.mean(1, keepdim=True)
    match options.get("scale_rewards", "group"):
        case "group":
            advantages_GN = advantages_GN / (nanstd(rewards_GN, dim=1, keepdim=True) + 1e-4)
        case "batch":
            advantages_GN = advantages_GN / (nanstd(rewards_B) + 1e-4)
    return advantages_GN.flatten()


def policy(name: str) -> Callable:
    def compare(options: dict[str, str], seed: int) -> Found:
        batch, groups = rollouts_of(seed, GENERATIONS)
        given = {k: v for k, v in options.items() if name == "grpo" or k != "loss_type"}
        weighed = weigh(name, given, groups)
        beta = float(options.get("beta", 0))
        rewards_B = batch.rewards_B
        if options.get("kl_estimator") == "k1":
            rewards_B = rewards_B - beta * (batch.sampled_BT - batch.reference_BT).sum(1)
            beta = 0.0
        advantages_B = advantages_of(rewards_B, options) if name == "grpo" else rewards_B
        epsilon = float(options.get("epsilon", 0.2))
        rloo = options["loss_type"] == "rloo"
        made = trainer(
            RLOOTrainer if rloo else GRPOTrainer,
            _get_per_token_logps_and_entropies=lambda *_, **__: (
                batch.log_probs_BT,
                torch.zeros_like(batch.log_probs_BT),
                None,
            ),
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=options.get("importance_sampling_level", "token"),
            beta=beta,
            loss_type=options["loss_type"],
            epsilon_low=epsilon,
            epsilon_high=float(options.get("epsilon_high", epsilon)),
            args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
            use_vllm=False,
            current_gradient_accumulation_steps=1,
            max_completion_length=int(options.get("max_completion_length", 512)),
            _entropy_bonus_enabled=False,
        )
        inputs = {
            "prompt_ids": torch.zeros(len(rewards_B), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(rewards_B), 1, dtype=torch.long),
            "completion_ids": torch.zeros_like(batch.mask_BT),
            "completion_mask": batch.mask_BT,
            "advantages": advantages_B,
            "old_per_token_logps": batch.sampled_BT,
            "old_logps": batch.sampled_BT.sum(1),
            "ref_per_token_logps": batch.reference_BT,
            "num_items_in_batch": batch.mask_BT.sum(),
        }
        loss = made._compute_loss(None, inputs)
        loss.backward()
        mine = gradient_of(weighed, batch.mask_BT.shape)
        return loss.item(), batch.log_probs_BT.grad, weighed.loss, mine

    return compare


def distill(options: dict[str, str], seed: int) -> Found:
    """On the policy itself, and the gradient alone: TRL's loss has log p for the ratio."""
    batch, _ = rollouts_of(seed, GENERATIONS)
    batch.sampled_BT = batch.log_probs_BT.detach().clone()
    weighed = weigh(
        "distill", options, [[side] for side in batch.sides(["rollout"] * len(batch.rewards_B))]
    )
    made = trainer(IWOPDTrainer, iw_opd_gamma=0.0, iw_opd_epsilon=1e-8, temperature=1.0)
    labels_BT = torch.where(batch.mask_BT == 1, 0, -100)
    likely_BT = torch.where(batch.mask_BT == 1, batch.log_probs_BT, -1.0)
    logits_BTV = torch.stack([likely_BT, torch.log(-torch.expm1(likely_BT))], -1)
    tokens_BT = torch.zeros_like(labels_BT)
    loss = made._compute_iw_opd_loss(
        logits_BTV, tokens_BT, labels_BT, batch.reference_BT, batch.sampled_BT
    )
    loss.backward()
    mine = gradient_of(weighed, batch.mask_BT.shape)
    return weighed.loss, batch.log_probs_BT.grad, weighed.loss, mine


CPO = {"alpha": 0.0, "cpo_alpha": 0.0, "loss_type": "simpo"}
SIMPO = {"beta": "2", "gamma": "0.7", "label_smoothing": "0.1"}
ORPO = {"beta": "0.1"}
KTO = {"beta": "0.1", "desirable_weight": "1.3", "undesirable_weight": "0.8"}
CASES: dict[str, tuple[Callable[[dict[str, str], int], Found], dict[str, str]]] = {
    "dpo sigmoid": (dpo, {"loss_type": "sigmoid", "beta": "0.1"}),
    "dpo sigmoid, smoothed": (
        dpo,
        {"loss_type": "sigmoid", "beta": "0.1", "label_smoothing": "0.2"},
    ),
    "dpo robust": (dpo, {"loss_type": "robust", "beta": "0.1", "label_smoothing": "0.2"}),
    "dpo hinge": (dpo, {"loss_type": "hinge", "beta": "0.5"}),
    "dpo ipo": (dpo, {"loss_type": "ipo", "beta": "0.1"}),
    "simpo": (
        from_logits(CPOTrainer, "simpo", SIMPO, simpo_gamma=0.7, label_smoothing=0.1, **CPO),
        SIMPO,
    ),
    "orpo": (from_logits(ORPOTrainer, "orpo", ORPO), ORPO),
    "kto": (kto, KTO),
    "kto apo_zero_unpaired": (kto, {**KTO, "loss_type": "apo_zero_unpaired"}),
    "grpo": (policy("grpo"), {"loss_type": "grpo"}),
    "grpo, k3": (policy("grpo"), {"loss_type": "grpo", "beta": "0.1"}),
    "grpo, scaled by batch": (policy("grpo"), {"loss_type": "grpo", "scale_rewards": "batch"}),
    "dapo": (policy("grpo"), {"loss_type": "dapo", "epsilon_high": "0.28"}),
    "bnpo": (policy("grpo"), {"loss_type": "bnpo"}),
    "dr_grpo": (policy("grpo"), {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "cispo": (policy("grpo"), {"loss_type": "cispo", "epsilon_high": "1.1"}),
    "gspo": (
        policy("grpo"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": "0.03"},
    ),
    "rloo, k1": (
        policy("grpo"),
        {"loss_type": "rloo", "scale_rewards": "none", "beta": "0.05", "kl_estimator": "k1"},
    ),
    "ppo": (policy("ppo"), {"loss_type": "bnpo"}),
    "ppo, k3": (policy("ppo"), {"loss_type": "bnpo", "beta": "0.1"}),
    "distill (gradient)": (distill, {}),
}


def main() -> int:
    worst = 0.0
    print(
        f"{'largest difference over ' + str(BATCHES) + ' batches':<36} {'loss':>9} {'gradient':>9}"
    )
    for case, (compare, options) in CASES.items():
        loss_error = gradient_error = 0.0
        for seed in range(BATCHES):
            theirs, their_gradient, mine, my_gradient = compare(options, seed)
            loss_error = max(loss_error, abs(mine - theirs) / max(abs(theirs), 1e-3))
            difference = (my_gradient - their_gradient).abs().max() / their_gradient.abs().max()
            gradient_error = max(gradient_error, float(difference))
        print(f"{case:<36} {loss_error:9.1e} {gradient_error:9.1e}")
        worst = max(worst, loss_error, gradient_error)
    return int(not np.isfinite(worst) or worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

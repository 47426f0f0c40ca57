"""Objectives for vox in numpy, the same on every backend.

    vox train --objective dpo -O beta=0.1 --data pairs.jsonl

    preference.py   dpo, orpo, simpo from pairs; kto from single answers
    rollouts.py     grpo, ppo and distill from sampled completions
    rows.py         rows of a data file -> documents of an objective
    options.py      options as strings -> a checked objective
    rewards.py      rewards of rollouts, and functions of one's own in a child process
    gym.py          tasks of reasoning-gym as rows

An objective is a pydantic dataclass whose fields are its options. `weigh` computes in float64 and
returns float32 weights, exactly `-d loss / d log_prob`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vox_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from vox_core.contract import Objective, ObjectiveSpec, Reward, RowStream


@hookimpl
def vox_objective(spec: ObjectiveSpec) -> Objective:
    """Return the objective `spec.name` with its options checked.

    Raises:
        ConfigError: C001, C002.
    """
    from vox_objectives.options import configure
    from vox_objectives.preference import DPO, KTO, ORPO, SimPO
    from vox_objectives.rollouts import GRPO, PPO, Distill

    kinds: dict[str, type[Objective]] = {
        "dpo": DPO,
        "orpo": ORPO,
        "kto": KTO,
        "simpo": SimPO,
        "grpo": GRPO,
        "ppo": PPO,
        "distill": Distill,
    }
    return configure(kinds[spec.name], spec)


@hookimpl
def vox_reward(name: str) -> Reward:
    """Return the reward `name`, or that of `FILE.py:FUNCTION`.

    Raises:
        ConfigError: C004, there is no such function.
    """
    from vox_objectives.rewards import reward_of

    return reward_of(name)


@hookimpl
def vox_open_rows(reference: str) -> RowStream:
    """Open a task of reasoning-gym: `gym:NAME` or `gym:NAME?size=500&seed=1`.

    Raises:
        DataError: D010, reasoning-gym is missing; D014, it has no such task or option, or its
            verifier does not accept the first row's own answer.
    """
    from vox_objectives.gym import open_task

    return open_task(reference)

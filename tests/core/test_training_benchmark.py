"""The benchmark of training: its documents, arithmetic, gate and tables; nothing here trains."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.training import cells, documents, gate, report, stats, table
from benchmarks.training.flops import document_flop, step_flop
from benchmarks.training.result import Measured, Round, to_json
from benchmarks.training.rounds import ADAPTER, OPTIMIZER, Bench
from benchmarks.training.shapes import SHAPES
from benchmarks.training.task import Answer, Task
from benchmarks.training.trainers import base
from benchmarks.training.trainers.base import cut_to, groups_by_length

TOKENS, FLOP = [100, 200, 300], [1000, 2000, 3000]
LOSSES = [3.0, 2.5, 2.0]


def answer(seconds: float, losses: list[float] = LOSSES, moved: float = 1.0) -> Answer:
    """A run whose first step ends after five seconds and whose others take `seconds` each."""
    marks = [5.0, 5.0 + seconds, 5.0 + 2 * seconds]
    return Answer(losses, marks, 9.0, moved, {"rss": 2_000_000_000}, "sdpa", "padded rows")


def task(**changes) -> Task:
    told = Task(
        trainer="trl",
        model="m",
        adapter="a",
        documents="d/documents.json",
        out="o",
        device="cuda",
        dtype="bf16",
        quant="none",
        lrs=(1e-5,),
        optimizer=OPTIMIZER,
        row_tokens=100,
        rank=ADAPTER.rank,
        alpha=ADAPTER.alpha,
        seed=1,
    )
    return replace(told, **changes)


def measured(*rounds: dict[str, Answer], faults: dict[str, str] | None = None) -> Measured:
    trainers = tuple(dict.fromkeys([*rounds[0], *(faults or {})]))
    cell = cells.Cell("tiny", "fp32", "chat", trainers, len(rounds), 3)
    reference = answer(1.0)
    told = [Round(answers, roof=5000.0) for answers in rounds]
    return Measured(cell, TOKENS, FLOP, reference, 1e-4, told, faults or {})


def row(one: Measured, trainer: str):
    return next(r for r in one.rows() if r.trainer == trainer)


# Parameters of the whole model as the repository states them, and those outside the linear modules
# of the body: embedding (and head), norms, biases.
@pytest.mark.parametrize(
    ("name", "whole", "outside"),
    [
        ("smollm2-135m", 134_515_008, 49152 * 576 + 61 * 576),
        ("smollm2-360m", 361_821_120, 49152 * 960 + 65 * 960),
        ("qwen2.5-1.5b", 1_543_714_304, 151936 * 1536 + 57 * 1536 + 28 * (1536 + 2 * 256)),
        ("qwen2.5-0.5b", 494_032_768, 151936 * 896 + 49 * 896 + 24 * (896 + 2 * 128)),
        ("qwen3-0.6b", 596_049_920, 151936 * 1024 + 57 * 1024 + 28 * 2 * 128),
        ("llama-3.1-8b", 8_030_261_248, 2 * 128256 * 4096 + 65 * 4096),
    ],
)
def test_a_shape_has_the_parameters_of_the_model_it_is_named_after(name, whole, outside):
    assert SHAPES[name].body + outside == whole


def test_flop_of_a_document_by_hand():
    shape = SHAPES["tiny"]
    # q and o 64 x 64, k and v 32 x 64, three of 128 x 64, in two layers.
    assert shape.body == 2 * (2 * 4096 + 2 * 2048 + 3 * 8192) == 73_728
    # 4 * 73,728 * 10, then 4 * 64 * 512 * 4, then 6 * 2 layers * 64 * 10 * 11.
    assert document_flop(shape, 10, 4) == 2_949_120 + 524_288 + 84_480


def test_flop_of_a_step_counts_trained_tokens_in_the_head_only():
    steps = documents.make_steps("mixed", 512, 2, 3)
    counted = [
        sum(document_flop(SHAPES["tiny"], len(d), int(d.weights_T.sum())) for d in step)
        for step in steps
    ]
    assert step_flop(SHAPES["tiny"], steps) == counted


@pytest.mark.parametrize(
    ("data", "mean", "share", "longest"),
    [("chat", 60, 0.6, 256), ("rows-128", 128, 1.0, 128), ("mixed", 330, 0.6, 2048)],
)
def test_documents_are_as_described(data, mean, share, longest):
    made = [d for step in documents.make_steps(data, 500, 200, 8) for d in step]
    lengths = [len(d) for d in made]
    assert np.mean(lengths) == pytest.approx(mean, rel=0.06)
    assert max(lengths) <= longest
    assert sum(d.weights_T.sum() for d in made) / sum(lengths) == pytest.approx(share, rel=0.05)
    assert all(d.weights_T[0] == 0 and d.weights_T.sum() for d in made)
    assert max(int(d.tokens_T.max()) for d in made) < 500


def test_documents_repeat_tokens_in_shares_of_their_own():
    made = [d for step in documents.make_steps("rows-1024", 49152, 8, 4) for d in step]
    shares = [np.mean(d.tokens_T[1:] == d.tokens_T[:-1]) for d in made]
    assert min(shares) < 0.1 and max(shares) > 0.9


def test_documents_of_a_text_are_pieces_of_it():
    steps = documents.make_steps("mixed", 500, 4, 4, np.arange(300))
    for document in [d for step in steps for d in step]:
        assert set(np.diff(document.tokens_T) % 300) == {1}


def test_documents_are_the_same_every_time_and_survive_their_file(tmp_path):
    first, again = (documents.make_steps("chat", 500, 2, 3) for _ in range(2))
    documents.write(tmp_path / "steps.json", first)
    read = documents.read(tmp_path / "steps.json")
    told = [[(d.tokens_T.tolist(), d.weights_T.tolist()) for d in step] for step in again]
    assert read == told


def test_groups_hold_every_document_once_and_stay_within_their_tokens():
    lengths = [7, 100, 3, 60, 41, 40, 250]
    for padded in (True, False):
        groups = groups_by_length(lengths, 100, padded=padded)
        assert sorted(i for group in groups for i in group) == list(range(7))
        for group in groups:
            inside = [lengths[i] for i in group]
            size = len(inside) * max(inside) if padded else sum(inside)
            assert size <= 100 or len(group) == 1
    # 250; 100; 60; 41 and 40 (82 of 100); 7 and 3.
    assert len(groups_by_length(lengths, 100, padded=True)) == 5
    assert len(groups_by_length(lengths, 100, padded=False)) == 4


def test_groups_are_halved_until_there_are_as_many_as_in_the_longest_step():
    groups = [[4], [1, 0, 3], [2, 5]]
    assert cut_to(groups, 5) == [[4], [1], [0], [3], [2, 5]]
    assert cut_to(groups, 3) == groups == [[4], [1, 0, 3], [2, 5]]
    assert sorted(map(len, cut_to(groups, 6))) == [1] * 6


def test_the_best_of_trl_is_padding_free_where_no_dense_mask_is_needed(monkeypatch):
    installed = {"flash_attn"}
    monkeypatch.setattr(base, "find_spec", lambda name: name if name in installed else None)
    assert base.padding_free(task())
    # Flash attention has no float32.
    assert not base.padding_free(task(dtype="fp32"))
    installed.clear()
    assert not base.padding_free(task())
    assert base.padding_free(task(device="cpu"))


@pytest.mark.parametrize(("dtype", "compute"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_a_quantised_base_computes_in_the_dtype_of_the_cell(dtype, compute):
    settings = base.quantisation(task(quant="nf4", dtype=dtype))
    assert settings["bnb_4bit_compute_dtype"] == compute
    assert base.quantisation(task(dtype=dtype)) == {}


def test_a_rate_leaves_the_first_step_out():
    assert stats.rate([1000, 200, 300], [60.0, 61.0, 65.0]) == 100
    with pytest.raises(ValueError, match="1 amounts and 1 marks"):
        stats.rate([1], [1.0])


def test_ratios_are_taken_round_by_round():
    # The second round was twice as slow for both.
    assert stats.ratios([30, 15, 32], [10, 5, 8]) == stats.Spread(3, 3, 4)


def test_the_gate_lets_the_tolerance_pass_and_no_more():
    assert gate.judge([3.0, 2.0002], [3.0, 2.0], 1.01e-4).passed
    verdict = gate.judge([3.0, 2.0003], [3.0, 2.0], 1e-4)
    assert not verdict.passed
    assert (verdict.step, verdict.worst) == (2, pytest.approx(1.5e-4))
    assert verdict.told() == "loss 2.00030 at step 2, expected 2.00000"


@pytest.mark.parametrize("losses", [[3.0, math.nan], [3.0, math.inf], [3.0], []])
def test_the_gate_stops_what_is_missing_or_no_number(losses):
    assert not gate.judge(losses, [3.0, 2.0], 1e-2).passed


def test_a_reference_that_is_no_number_lets_nobody_pass():
    assert not gate.judge([3.0, 2.0, 1.0], [3.0, math.nan, 1.0], 1e-2).passed


def test_a_row_by_hand():
    one = measured({"vox": answer(1.0), "trl": answer(4.0)}, {"vox": answer(2.0), "trl": answer(6)})
    vox, trl = one.rows()
    # 500 tokens in two steps of a second, then of two.
    assert vox.tokens_per_second == stats.Spread(187.5, 125, 250)
    assert trl.ahead == stats.Spread(3.5, 3, 4)
    assert vox.ahead == stats.Spread(1, 1, 1)
    # 5000 FLOP in 2 s and in 4 s, of 5000 a second.
    assert vox.utilisation == pytest.approx((0.5 + 0.25) / 2)
    assert vox.to_adapter == 9.0
    assert vox.memory == {"rss": 2_000_000_000}


def test_one_bad_round_makes_a_row_void():
    off = answer(1.0, [3.0, 2.5, 2.1])
    one = measured({"vox": answer(1), "trl": answer(2)}, {"vox": answer(1), "trl": off})
    trl = row(one, "trl")
    assert trl.tokens_per_second is None and trl.ahead is None
    assert trl.void == "loss 2.10000 at step 3, expected 2.00000"
    assert row(one, "vox").void is None


def test_an_adapter_that_was_not_trained_makes_a_row_void():
    one = measured({"vox": answer(1), "trl": answer(2, moved=0.5)})
    assert "moved 0.50 times as far" in row(one, "trl").void


def test_a_trainer_that_fails_is_a_row_with_its_reason():
    one = measured({"vox": answer(1)}, faults={"trl": "OutOfMemoryError: 2 GB"})
    assert row(one, "trl").void == "failed: OutOfMemoryError: 2 GB"


def test_nothing_is_ahead_of_a_vox_that_has_no_result():
    wrong = answer(1, [3.0, 2.5, 9.0])
    assert row(measured({"vox": wrong, "trl": answer(2)}), "trl").ahead is None
    untrained = measured({"vox": answer(1, moved=0.5), "trl": answer(2)})
    assert row(untrained, "vox").void and row(untrained, "trl").void is None
    assert row(untrained, "trl").ahead is None
    failed = measured({"trl": answer(2)}, faults={"vox": "broken"})
    assert row(failed, "trl").ahead is None


def bench(tmp_path, monkeypatch, run) -> Bench:
    """One whose processes are `run(task, name)`, over three steps of the tiny model."""
    steps = documents.make_steps("chat", 512, 3, 2)
    monkeypatch.setattr(Bench, "_prepare", lambda self, cell: (task(dtype=cell.dtype), steps))
    monkeypatch.setattr(Bench, "_run", lambda self, told, name: run(told, name))
    monkeypatch.setattr(Bench, "_roof", lambda self, cell: 5000.0)
    return Bench("cpu", tmp_path, tmp_path, 1, lambda line: None)


CELL = cells.Cell("tiny", "bf16", "chat", ("vox", "trl"), 2, 3)


def test_the_reference_is_the_plain_loop_in_float32_and_vox_is_held_against_it(
    tmp_path, monkeypatch
):
    asked = []

    def run(told: Task, name: str) -> Answer:
        asked.append((name, told.trainer, told.dtype))
        return answer(1, [3.0, 2.5, 9.0] if told.trainer == "vox" else LOSSES)

    one = bench(tmp_path, monkeypatch, run).measure(CELL)
    assert asked[0] == ("reference-documents", "reference", "fp32")
    assert row(one, "vox").void == "loss 9.00000 at step 3, expected 2.00000"
    assert row(one, "trl").void is None


def test_without_a_reference_all_rows_are_void_and_are_told(tmp_path, monkeypatch):
    asked = []

    def run(told: Task, name: str) -> str:
        asked.append(name)
        return "OutOfMemoryError: 40 GB"

    made = bench(tmp_path, monkeypatch, run)
    told = [json.loads(json.dumps(to_json(made.measure(CELL)))) for _ in range(2)]
    # Nothing is trained that could not be judged, and what failed once is not tried again.
    assert asked == ["reference-documents"]
    for one in told:
        assert [r["void"] for r in one["rows"]] == ["no reference: OutOfMemoryError: 40 GB"] * 2
        assert "void: no reference: OutOf" in table.terminal(one["rows"])


def test_the_sorted_loop_has_steps_a_reference_and_tokens_of_its_own(tmp_path, monkeypatch):
    asked = {}

    def run(told: Task, name: str) -> Answer:
        asked[name] = told.documents
        # Of the run's order, or of the sorted one: each is far off the other's reference.
        return answer(1, [9.0, 9.0, 9.0] if "sorted" in told.documents else LOSSES)

    made = bench(tmp_path, monkeypatch, run)
    monkeypatch.setattr(documents, "write", lambda file, steps: asked.update({"steps": steps}))
    one = made.measure(replace(CELL, trainers=("vox", "loop", cells.SORTED), rounds=1))
    assert asked["vox-0"] == asked["loop-0"] == asked["reference-documents"]
    assert asked["loop-sorted-0"] == asked["reference-documents-loop-sorted"] != asked["vox-0"]
    assert [r.void for r in one.rows()] == [None, None, None]
    work = one.work(cells.SORTED)
    assert work.tokens == documents.tokens(asked["steps"]) and sum(work.tokens) == sum(one.tokens)
    assert row(one, cells.SORTED).tokens_per_second.median == sum(work.tokens[1:]) / 2


def test_steps_sorted_by_length_hold_the_same_documents_and_pad_little():
    steps = documents.make_steps("mixed", 500, 6, 4)
    made = documents.sorted_by_length(steps)
    assert [len(step) for step in made] == [len(step) for step in steps]
    ids = [{id(d) for step in each for d in step} for each in (steps, made)]
    assert ids[0] == ids[1]
    assert made[0] is steps[0]
    padded = sum(len(step) * max(map(len, step)) for step in made[1:])
    assert padded <= 1.02 * sum(len(d) for step in made[1:] for d in step)


def test_mlx_lm_is_held_against_vox_on_mlx():
    one = measured({"vox": answer(1), "vox-mlx": answer(2), "mlx-lm": answer(6)})
    assert row(one, "mlx-lm").ahead == stats.Spread(3, 3, 3)


def test_tables_have_the_numbers_and_the_reasons():
    one = measured({"vox": answer(1), "trl": answer(4), "loop": answer(1, [3, 2.5, math.nan])})
    rows = json.loads(json.dumps(to_json(one), allow_nan=False))["rows"]
    lines = table.terminal(rows).splitlines()
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[1].split()[:2] == ["vox", "250"]
    assert "4.00 (4.00 to 4.00)" in lines[2]
    assert lines[3].startswith("loop ") and "void: loss nan at step 3" in lines[3]
    marked = table.markdown(rows).splitlines()
    assert len({line.count("|") for line in marked}) == 1


def test_the_notes_tell_how_each_that_answered_computed():
    trl = replace(answer(2, moved=0.1), attention="flash_attention_2", layout="padding-free rows")
    one = measured({"vox": answer(1), "trl": trl}, faults={"loop": "broken"})
    assert table.notes(to_json(one)["rows"]) == (
        "Attention and layout: vox: sdpa, padded rows; trl: flash_attention_2, padding-free rows."
    )
    assert table.notes(to_json(measured({}, faults={"vox": "broken"}))["rows"]) == ""


def test_memory_of_a_gpu_is_told_instead_of_the_process():
    on_gpu = {"rss": 5, "allocated": 3_000_000_000, "reserved": 4_000_000_000}
    one = measured({"vox": replace(answer(1), memory=on_gpu)})
    assert "3.00 GB, 4.00 reserved" in table.terminal(to_json(one)["rows"])


def test_the_page_says_where_when_and_with_what_command():
    result = {
        "name": "cpu",
        "date": "2026-01-02 03:04 UTC",
        "command": "python -m benchmarks.training --quick",
        "machine": {"cpu": "A processor", "threads": 2, "system": "Linux"},
        "versions": {"torch": "2.13.0"},
        "cells": [to_json(measured({"vox": answer(1), "trl": answer(4)}))],
    }
    page = report.page([json.loads(json.dumps(result))])
    for told in (result["date"], result["command"], "A processor, 2 threads", "torch 2.13.0"):
        assert told in page
    assert "### tiny/fp32/chat" in page and "| trl | 62 |" in page
    assert "Attention and layout: vox: sdpa, padded rows; trl: sdpa, padded rows." in page


def test_the_page_is_the_one_of_the_results():
    assert report.PAGE.read_text() == report.current(), "python -m benchmarks.training.report"


def test_every_cell_has_a_shape_and_an_id_of_its_own():
    for made in (cells.cpu(quick=True), cells.cpu(quick=False), cells.cuda(quick=False)):
        assert len({cell.id for cell in made}) == len(made)
        assert all(cell.model.removesuffix("-real") in SHAPES for cell in made)
        assert all(cell.steps > 1 for cell in made)

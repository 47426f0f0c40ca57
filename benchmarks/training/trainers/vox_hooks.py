"""vox: the backend that is installed, driven through its hooks as the core drives it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.training import documents
from benchmarks.training.models import model_type
from benchmarks.training.task import Diary, Task
from vox_core.adapter.initial import initial_adapter
from vox_core.adapter.peft import read_adapter, write_adapter
from vox_core.adapter.targets import linear_modules, select_targets, trained_parameters
from vox_core.contract import (
    AdapterSpec,
    AdapterState,
    DataIdentity,
    Event,
    ExecutionPlan,
    FineTuneContract,
    ModelIdentity,
    Notice,
    Packing,
    Step,
    StepDone,
    TrainJob,
    TrainState,
    probe_document,
)
from vox_core.data.batching import cut
from vox_core.data.encode import Document
from vox_core.host import Request, Selection, choose
from vox_core.host.load import Context
from vox_core.run.learner import Learner
from vox_core.run.plan import has_tied_head
from vox_core.weights import WeightFolder

_END_TO_END = ("vox's own", "documents end to end")
_PADDED = ("the model's own", "padded rows")
"""Attention and layout of the torch backends; a notice says when a model needs the second."""


def train(task: Task, diary: Diary) -> None:
    backend, selection = choose(_request(task))
    steps = _documents(task)
    plan = _plan(task, selection, [d for step in steps for d in step])
    start = TrainState(0, _start(task, plan))
    made = [_step(task, index, step) for index, step in enumerate(steps)]
    job = TrainJob(plan, Path(task.model), probe_document(made[0].batches))

    mlx = task.trainer == "vox-mlx"
    diary.attention, diary.layout = ("mlx", "padded rows") if mlx else _END_TO_END

    def observe(event: Event) -> None:
        if isinstance(event, Notice) and "padded rows" in event.message:
            diary.attention, diary.layout = _PADDED

    with closing(backend.train(job, Context(observe))) as trainer:
        learner = Learner(trainer, start, plan.contract.optimizer, plan.contract.seed)
        for step in made:
            done = learner.take(step)
            if isinstance(done, StepDone):
                diary.step(done.loss)
        trained = learner.state()
        if task.method == "full":  # the trainer reads them one by one
            _write_model(task, plan, trained.adapter)
            return
    linear = linear_modules(WeightFolder(Path(task.model)).tensors, model_type(Path(task.model)))
    write_adapter(Path(task.out), trained.adapter, base=task.model, modules=linear)


def _start(task: Task, plan: ExecutionPlan) -> AdapterState:
    if task.method == "lora":
        return read_adapter(Path(task.adapter))
    read = WeightFolder(Path(task.model)).read
    return initial_adapter({}, plan.contract.adapter, task.seed, read, plan.saved)


def _write_model(task: Task, plan: ExecutionPlan, trained: AdapterState) -> None:
    from safetensors.numpy import save_file

    tensors = {plan.saved[name]: value for name, value in trained.tensors().items()}
    save_file(tensors, Path(task.out) / "model.safetensors")


def _request(task: Task) -> Request:
    backend = "mlx" if task.trainer == "vox-mlx" else task.device
    return Request(
        operation="train",
        quant=task.quant,
        dtype=task.dtype,
        method=task.method,
        model_type=model_type(Path(task.model)),
        explicit=backend,
        allow_cpu=True,
    )


def _documents(task: Task) -> list[list[Document]]:
    return [
        [
            Document(np.array(t, np.int32), np.array(w, np.float32), Path(task.documents), 0, 0)
            for t, w in step
        ]
        for step in documents.read(Path(task.documents))
    ]


def _step(task: Task, index: int, step: list[Document]) -> Step:
    """Cut as `vox train` cuts it."""
    batches, total = cut(step, task.row_tokens, _packing(task))
    return Step(index + 1, batches, total, task.lrs[index])


def _packing(task: Task) -> Packing:
    return "rows" if task.trainer == "vox-mlx" else "end-to-end"


def _plan(task: Task, selection: Selection, all_documents: list[Document]) -> ExecutionPlan:
    folder = Path(task.model)
    family = model_type(folder)
    tensors = WeightFolder(folder).tensors
    adapter, modules, saved = AdapterSpec("full", 0, 0.0, 0.0, ()), {}, {}
    if task.method == "full":
        tied = has_tied_head(json.loads((folder / "config.json").read_text()))
        saved = trained_parameters(tensors, family, (), tied=tied)
    else:
        adapter = AdapterSpec("lora", task.rank, task.alpha, 0.0, ("all-linear",))
        modules = select_targets(linear_modules(tensors, family), adapter.targets)
    longest = max(len(document) for document in all_documents)
    contract = FineTuneContract(
        model=ModelIdentity(None, family, "", ""),
        data=DataIdentity("", len(all_documents), sum(map(len, all_documents)), 0),
        adapter=adapter,
        quant=task.quant,
        optimizer=task.optimizer,
        batch_size=len(all_documents) // len(task.lrs),
        seq_len=longest,
        total_steps=len(task.lrs),
        seed=task.seed,
    )
    return ExecutionPlan(
        contract=contract,
        backend=selection.chosen,
        backend_version="",
        device=task.device,
        dtype=task.dtype,
        micro_batch_tokens=task.row_tokens,
        modules=modules,
        saved=saved,
        eval_every=0,
        save_every=0,
        longest=longest,
        packing=_packing(task),
    )

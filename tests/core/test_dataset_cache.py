"""Data sets from files: what is kept in the cache, when it is used, and who makes it."""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NoReturn

import pytest

from tests.core.data_samples import build_dataset, load_records
from tests.core.tiny_tokenizer import tiny_tokenizer
from vox_core import files
from vox_core.config import named_file, reading
from vox_core.contract import ObjectiveSpec
from vox_core.data import dataset_cache, row_facts, rows, worker
from vox_core.data.checked import Block, CheckedFile, check_files, cut, unused_fields
from vox_core.data.dataset import Dataset
from vox_core.data.dataset_cache import ENTRY
from vox_core.data.records import readable
from vox_core.data.rows import examples_of
from vox_core.data.tokenizer import load_tokenizer
from vox_core.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": "how?"}, {"role": "assistant", "content": "so"}]},
    {"prompt": "who äöü 日本", "completion": "the answer", "id": 7},
    {"text": "a number " * 60, "id": 8, "tag": None},
    {"prompt": "a question " * 60, "completion": "yes"},
]


def write(path: Path, rows: int = 12) -> Path:
    lines = [json.dumps(ROWS[n % len(ROWS)], ensure_ascii=n % 2 == 0) for n in range(rows)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tiny_tokenizer("chatml").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "train.jsonl")


def made(*data: Path, model: Path, seq_len: int = 64, **options: object) -> Dataset:
    load: Callable[[], object] = lambda: load_tokenizer(model)  # noqa: E731
    return dataset_cache.open_dataset(check_files(data), model, load, seq_len, **options)


def from_cache(*data: Path, model: Path, seq_len: int = 64) -> Dataset:
    return dataset_cache.open_dataset(check_files(data), model, not_asked, seq_len)


def not_asked(*_: object) -> NoReturn:
    raise AssertionError("the cache should have had it")


def contents(dataset: Dataset) -> tuple[object, ...]:
    return (
        dataset.digest,
        (dataset.tokens, dataset.trained_tokens, dataset.longest, dataset.stats.rows),
        (dict(dataset.stats.dropped), dict(dataset.stats.truncated)),
        [(d.tokens_T.tolist(), d.weights_T.tolist()) for d in dataset],
        [(d.source, d.line, d.ends) for d in dataset],
    )


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "documents").iterdir())


# --- what is kept ---------------------------------------------------------------------------------


def test_a_second_start_reads_no_row_and_no_tokenizer(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write(tmp_path / "other.jsonl", rows=3)
    first = made(data, other, data, model=model)
    in_memory = build_dataset(load_records([data, other, data]), load_tokenizer(model), 64)
    assert contents(first) == contents(in_memory)
    assert first.stats.dropped and first.stats.truncated and len(first) > 9
    monkeypatch.setattr(row_facts, "read_lines", not_asked)
    again = from_cache(data, other, data, model=model)
    assert contents(again) == contents(first)
    assert unused_fields(check_files([data, other, data])) == {"id": 8, "tag": 4}
    assert not again.notes


def test_the_documents_are_mapped_and_not_held(model: Path, data: Path) -> None:
    import mmap

    tokens_T = made(data, model=model)[0].tokens_T
    while tokens_T.base is not None and not isinstance(tokens_T.base, mmap.mmap):
        tokens_T = tokens_T.base
    assert isinstance(tokens_T.base, mmap.mmap)


def test_what_decides_the_tokens_decides_the_entry(model: Path, data: Path, cache: Path) -> None:
    def number() -> int:
        made(data, model=model)
        return len(entries(cache))

    assert number() == number() == 1
    made(data, model=model, seq_len=63)
    assert len(entries(cache)) == 2
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().replace("SmolLM", "Smol"))
    assert number() == 3
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert number() == 4
    data.write_text(data.read_text().replace("how?", "how so?"))
    assert number() == 5
    (model / "model.safetensors").write_bytes(b"other weights")
    assert number() == 5
    moved = data.rename(data.with_name("moved.jsonl"))
    assert from_cache(moved, model=model)[0].source == moved


def test_other_versions_make_another_entry(
    model: Path, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(data, model=model)
    with monkeypatch.context() as patch:
        patch.setattr(dataset_cache, "version", lambda name: "99" if name == "tokenizers" else "1")
        made(data, model=model)
    monkeypatch.setattr(dataset_cache, "CACHE_VERSION", 0)
    made(data, model=model)
    assert len(entries(cache)) == 3


ALTERATIONS: dict[str, Callable[[Path], object]] = {
    "a bit": lambda path: path.write_bytes(
        bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:]
    ),
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0\0\0\0"),
    "empty": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
}


@pytest.mark.parametrize("name", ["tokens_T", "weights_T", "documents_D", ENTRY])
@pytest.mark.parametrize("alteration", ALTERATIONS)
def test_an_altered_entry_is_made_anew(
    model: Path, data: Path, cache: Path, name: str, alteration: str
) -> None:
    whole = contents(made(data, model=model))
    (entry,) = entries(cache)
    ALTERATIONS[alteration](entry / name)
    assert dataset_cache.read_dataset(entry, [data]) is None or (
        name == ENTRY and alteration == "longer"
    )
    assert contents(made(data, model=model)) == whole
    assert contents(from_cache(data, model=model)) == whole


def test_an_entry_that_says_other_numbers_is_made_anew(
    model: Path, data: Path, cache: Path
) -> None:
    whole = contents(made(data, model=model))
    (entry,) = entries(cache)
    said = json.loads((entry / ENTRY).read_text())
    for change in ({"digest": "0"}, {"trained_tokens": 1}, {"sha256": ""}, {"stats": {}}):
        (entry / ENTRY).write_text(json.dumps({**said, **change}))
        assert dataset_cache.read_dataset(entry, [data]) is None
    assert contents(made(data, model=model)) == whole


def test_a_cache_that_cannot_be_written_is_done_without(
    model: Path, data: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(made(data, model=model))
    shutil.rmtree(cache)
    cache.write_text("a file in its place")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    dataset = made(data, model=model)
    assert contents(dataset) == whole
    (note,) = dataset.notes
    assert "kept for this run only" in note and str(cache) in note
    assert list((tmp_path / "temporary").iterdir())
    del dataset
    gc.collect()
    assert not list((tmp_path / "temporary").iterdir())


def test_of_two_that_make_the_same_entry_the_later_takes_it(
    model: Path, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = []

    def require_trained(*_: object) -> None:
        monkeypatch.undo()
        monkeypatch.setenv("VOX_CACHE", str(cache))
        whole.append(contents(made(data, model=model)))

    monkeypatch.setattr(dataset_cache, "require_trained", require_trained)
    late = made(data, model=model)
    assert [contents(late)] == whole
    assert not late.notes
    assert len(entries(cache)) == 1


def test_entries_that_nobody_used_for_a_month_go(model: Path, data: Path, cache: Path) -> None:
    made(data, model=model)
    made(data, model=model, seq_len=63)
    old = time.time() - 31 * 24 * 3600
    for entry in entries(cache):
        os.utime(entry, (old, old))
    (cache / "documents" / ".tmp-killed").mkdir()
    os.utime(cache / "documents" / ".tmp-killed", (old, old))
    from_cache(data, model=model)
    made(data, model=model, seq_len=62)
    assert len(entries(cache)) == 2
    from_cache(data, model=model)


# --- files that have been looked at ---------------------------------------------------------------


def test_faults_are_those_of_the_cache(data: Path, tmp_path: Path) -> None:
    bad, empty = tmp_path / "bad.jsonl", tmp_path / "empty.jsonl"
    bad.write_text('{"text": "a"}\n{"txt": 1}\n\nnonsense\n')
    empty.write_text("\n")
    for paths in ([data, bad, tmp_path / "none"], [data, bad], [bad, empty], [data, empty]):
        seen = []
        for look in (check_files, check_files):
            with pytest.raises(DataError) as caught:
                look(paths)
            seen.append((str(caught.value), caught.value.faults))
        assert seen[0] == seen[1]


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, data: Path, cache: Path
) -> None:
    (file,) = check_files([data])
    data.write_text(data.read_text() + "\n" + json.dumps(ROWS[0]))
    with pytest.raises(DataError, match="changed while it was read") as caught:
        dataset_cache.open_dataset([file], model, lambda: load_tokenizer(model), 64)
    assert caught.value.code == "VOX-D001"
    assert entries(cache) == []
    stale = replace(file, origin=check_files([data])[0].origin)
    data.write_text("nonsense")
    with pytest.raises(DataError, match="changed while it was read"):
        dataset_cache.open_dataset([stale], model, lambda: load_tokenizer(model), 64)


def test_rows_that_are_refused_leave_no_entry(model: Path, data: Path, cache: Path) -> None:
    (model / "chat_template.jinja").unlink()
    with pytest.raises(DataError) as caught:
        made(data, model=model)
    assert (caught.value.code, len(caught.value.faults)) == ("VOX-D005", 1)
    assert str(caught.value.found).startswith("3 rows")
    data.write_text(json.dumps({"prompt": "a question " * 60, "completion": "yes"}))
    tiny_tokenizer("chatml").save_pretrained(model)
    with pytest.raises(DataError, match="every row was dropped"):
        made(data, model=model, seq_len=8)
    assert entries(cache) == []


# --- blocks and processes -------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 50, 200, 1 << 20])
@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf", b"\n \n"])
@pytest.mark.parametrize("tail", [b"", b"\n", b"\r\n\n"])
def test_blocks_hold_every_row_with_its_line(
    tmp_path: Path, data: Path, size: int, head: bytes, tail: bytes
) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(head + data.read_bytes() + tail)
    blocks = list(cut(check_files([other, data]), size))
    assert [row.sides[""] for block in blocks for row in block.rows()] == load_records(
        [other, data]
    )
    assert len(blocks) >= (2 if size > 200 else 10)
    assert min(len(block.lines) for block in blocks) >= 2  # an objective may compare two rows


def test_a_row_without_another_one_is_refused_where_an_objective_compares_rows() -> None:
    row = {"prompt": "how?", "completion": "so", "label": True}
    alone = Block(Path("a.jsonl"), 0, [(1, json.dumps(row).encode())])
    kto, apo = ({}, {"loss_type": "apo_zero_unpaired"})
    (found,) = alone.rows(examples_of(ObjectiveSpec("kto", kto)))
    assert not found.sides and "found no other row" in found.misfit
    (found,) = alone.rows(examples_of(ObjectiveSpec("kto", apo)))
    assert list(found.sides) == ["chosen"] and not found.misfit


def test_any_number_of_processes_gives_the_same(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "long.jsonl", rows=160)
    one = contents(made(data, model=model, workers=0))
    shutil.rmtree(cache)
    monkeypatch.setattr(dataset_cache, "make_part", not_asked)
    assert contents(made(data, model=model, workers=2, block_bytes=300)) == one


def test_processes_read_the_settings_file_that_the_command_names(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `[plugin]` decides which plugin an objective is from. Threads have no context of ours."""

    class Here(worker.Worker):
        def __call__(self, function, *args, **kwargs):
            return function(*args, **kwargs)

    named = set[Path | None]()

    def note(*_: object) -> NoReturn:
        named.add(named_file())
        raise KeyError

    monkeypatch.setattr(dataset_cache, "Worker", Here)
    monkeypatch.setattr(dataset_cache, "make_part", note)
    data = write(tmp_path / "long.jsonl")
    with reading("my.toml"), pytest.raises(KeyError):
        made(data, model=model, workers=1)
    assert named == {Path("my.toml")}


@pytest.mark.parametrize("program", ["#!/bin/sh\nexit 1\n", None])
def test_processes_that_do_not_start_are_done_without(
    model: Path, tmp_path: Path, cache: Path, program: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write(tmp_path / "long.jsonl", rows=80)
    one = contents(made(data, model=model, workers=0))
    shutil.rmtree(cache)
    if program:
        (tmp_path / "python").write_text(program)
        (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert contents(made(data, model=model, workers=2, block_bytes=300)) == one


def test_a_template_that_hangs_in_another_process_is_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only with the words of one row, which no probe has."""
    data = write(tmp_path / "long.jsonl", rows=80)
    hangs = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    template = model / "chat_template.jinja"
    text = f"{{% if messages[0].content == 'how?' %}}{hangs}{{% endif %}}" + template.read_text()
    template.write_text(text)
    monkeypatch.setattr(worker, "SECONDS", 0.5)
    with pytest.raises(DataError, match="takes more time or memory") as caught:
        made(data, model=model, workers=2, block_bytes=300)
    assert caught.value.code == "VOX-D005"


def test_how_many_processes_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_cache, "cpus", lambda: 4)
    sizes = (1000, 20_000_000, 30_000_000, 60_000_000, 10**9)
    assert [dataset_cache.workers_for(size) for size in sizes] == [0, 1, 2, 3, 4]


# --- child processes ------------------------------------------------------------------------------


def test_a_call_that_is_interrupted_does_not_answer_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    child = worker.Worker()
    assert child(abs, -1) == 1
    with monkeypatch.context() as patch:
        patch.setattr(worker.Connection, "recv", interrupt)
        with pytest.raises(KeyboardInterrupt):
            child(abs, -2)
    assert child(abs, -3) == 3
    child.close()


def test_a_child_that_is_closed_ends_the_call_that_waits_for_it() -> None:
    child = worker.Worker()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(child, signal.pause)
        child.close()
        with pytest.raises(worker.WorkerDied):
            waiting.result()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process of somebody else's")
def test_a_child_ends_with_a_parent_that_is_killed() -> None:
    program = (
        "import os, signal; from vox_core.data.worker import Worker; child = Worker()\n"
        "print(child(os.getpid), flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


def test_progress_is_told_to_the_end(model: Path, data: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    made(data, model=model, block_bytes=300, progress=lambda *told: seen.append(told))
    size = data.stat().st_size
    assert seen[-1] == ("tokenising", size, size) and len(seen) > 3


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_cannot_be_read_to_its_end_is_no_shorter_data_set(
    model: Path, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Whoever meets the error: with a worker that is another thread's, most of the time."""

    def failing(files: Sequence[CheckedFile], size: int) -> Iterator[Block]:
        blocks = cut(files, size)
        yield from islice(blocks, 4)
        with readable(data):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(dataset_cache, "cut", failing)
    with pytest.raises(DataError, match="cannot be read") as caught:
        made(data, model=model, workers=workers, block_bytes=300)
    assert caught.value.where == str(data)
    assert entries(cache) == []


def test_a_worker_imports_nothing_from_the_current_folder(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/json.py").write_text("open('ran', 'w')\n")
    monkeypatch.chdir(tmp_path / "here")
    made(data, model=model, workers=1, block_bytes=300)
    assert [file.name for file in Path().iterdir()] == ["json.py"]


def test_a_full_disk_is_done_without_a_cache(
    model: Path, data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*paths: Path) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_put_in_place", full)
    dataset = made(data, model=model)
    assert len(dataset) > 9
    assert ["the disk is full" in note for note in dataset.notes] == [True]
    assert entries(cache) == []


def test_a_weight_between_0_and_1_is_kept_as_it_is(model: Path, tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": "so", "weight": weight} for weight in (0.5, 1)]
    user = {"role": "user", "content": "how?"}
    rows = [
        {"messages": [user, answers[0], user, answers[1]]},
        {"prompt": "who", "completion": "I"},
    ]
    data = tmp_path / "weighted.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    first = made(data, model=model, block_bytes=1)  # some parts of two rows
    whole = build_dataset(load_records([data]), load_tokenizer(model), 64)
    assert contents(first) == contents(from_cache(data, model=model)) == contents(whole)
    assert {*first[0].weights_T.tolist()} == {0, 0.5, 1}


@pytest.mark.parametrize(
    ("name", "options", "other", "same"),
    [
        ("dpo", {"beta": "0.1"}, ("dpo", {"loss_type": "ipo"}), True),
        ("dpo", {}, ("simpo", {}), False),
        ("kto", {}, ("kto", {"beta": "0.2"}), True),
        ("kto", {}, ("kto", {"loss_type": "apo_zero_unpaired"}), False),
        ("grpo", {"beta": "0.2"}, ("ppo", {}), True),
        ("grpo", {}, ("sft", {}), False),
        ("dpo", {}, ("sft", {}), False),
    ],
)
def test_options_that_change_no_token_make_no_other_entry(
    model: Path, name: str, options: dict[str, str], other: tuple[str, dict[str, str]], same: bool
) -> None:
    specs = ObjectiveSpec(name, options), ObjectiveSpec(*other)
    one, two = (dataset_cache._key([], model, 64, spec) for spec in specs)
    assert (one == two) is same


def test_options_of_an_objective_that_declares_nothing_make_another_entry(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objective = rows.load_objective("dpo")
    monkeypatch.setattr(type(objective), "options_of_examples", None)
    one, two = (ObjectiveSpec("dpo", {"beta": beta}) for beta in ("0.1", "0.2"))
    assert rows.identity_of(one) != rows.identity_of(two)


def test_another_version_of_the_objectives_plugin_makes_another_entry(
    model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = rows.provider("objectives", "dpo")

    def key(version: str) -> str:
        manifest = replace(plugin.manifest, version=version)
        found = replace(plugin, manifest=manifest)
        monkeypatch.setattr(rows, "provider", lambda point, name: found)
        return dataset_cache._key([], model, 64, ObjectiveSpec("dpo"))

    assert key("1.0") == key("1.0") != key("1.1")

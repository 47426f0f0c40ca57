"""Does a run of N processes train what one process trains?

    python benchmarks/many_processes.py equal OUT          1, 2 and 4 processes, 20 steps, dropout
    python benchmarks/many_processes.py resumed OUT        2 processes, then 1, 3 and 2
    python benchmarks/many_processes.py mlx OUT            1 and 2 processes of MLX; torch, then MLX
    python benchmarks/many_processes.py killed OUT COUNT   a rank killed, stopped or cut off
    python benchmarks/many_processes.py objectives OUT     DPO and GRPO, 3 steps, 1 and 2 processes
    python benchmarks/many_processes.py speed OUT          tokens/s and bytes on the loopback
    python benchmarks/many_processes.py ray OUT            a worker of a Ray cluster killed
    python benchmarks/many_processes.py shard OUT          a base split between 2 processes
    python benchmarks/many_processes.py full OUT           the same with --method full, and resumed

SmolLM2-135M in float32 on the quick start's data, one thread per process but for `speed`. A line
per comparison: the largest relative difference of a loss, that of the trained weights relative
to their largest value, and whether the files are the same bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import load, load_file

import vox_core

VOX = str(Path(sys.executable).with_name("vox"))
DATA = Path(vox_core.__file__).parent / "quickstart" / "data"
COMMON = [
    *("--model", "smollm2-135m", "--dtype", "fp32", "--allow-cpu"),
    *("--tune", "ignore", "--batch-size", "8", "--micro-batch-tokens", "128"),
]
CPU, MLX = ["--backend", "cpu"], ["--backend", "mlx", "--launcher", "mlx"]
ROWS = ["--data", str(DATA / "train.jsonl"), "--valid", str(DATA / "valid.jsonl")]
DROPOUT = ["--dropout", "0.1"]


def train(
    *arguments: object, processes: int = 1, threads: int = 1, backend: list[str] = CPU
) -> float:
    """Run `vox train`; return the seconds it took."""
    began = time.monotonic()
    subprocess.run(
        [VOX, "train", *map(str, arguments), *backend, "--processes", str(processes)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.DEVNULL,
    )
    return time.monotonic() - began


def events(run: Path, name: str) -> list[dict[str, float]]:
    lines = (json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


def compare(label: str, one: Path, other: Path, limit: float = 1e-6) -> bool:
    """Print how far two runs are apart; return whether losses are within `limit`, and the trained
    weights within 1e-5, or 0 if that is the limit."""
    losses = [{int(e["step"]): e["loss"] for e in events(run, "step")} for run in (one, other)]
    apart = max(abs(losses[1][step] / loss - 1) for step, loss in losses[0].items())
    files = [result(run).read_bytes() for run in (one, other)]
    first, second = map(load, files)
    largest = max(float(np.abs(value).max()) for value in first.values())
    moved = max(float(np.abs(first[name] - second[name]).max()) for name in first) / largest
    same = "same bytes" if files[0] == files[1] else "other bytes"
    print(f"{label}: losses {apart:.1e}, weights {moved:.1e}, {same}", flush=True)
    return apart <= limit and moved <= (1e-5 if limit else 0)


def result(run: Path) -> Path:
    """The adapter of a run, or with the method `full` the model."""
    model = run / "model/model.safetensors"
    return model if model.exists() else run / "adapter_model.safetensors"


def equal(out: Path) -> bool:
    for processes in (1, 2, 4):
        train(*COMMON, *ROWS, *DROPOUT, "--max-steps", 20, "--out", out / str(processes),
              processes=processes)  # fmt: skip
    good = [compare(f"{n} processes", out / "1", out / str(n)) for n in (2, 4)]
    return all(good)


def resumed(out: Path) -> bool:
    settings = [*COMMON, *ROWS[:2], *DROPOUT, "--save-every", 3]
    train(*settings, "--max-steps", 6, "--out", out / "whole", processes=2)
    found = []
    for processes in (1, 3, 2):
        run = out / f"then-{processes}"
        # A learning rate that does not depend on the number of steps.
        train(*settings, "--max-steps", 3, "--allow-change", "max-steps", "--schedule", "constant",
              "--out", run, processes=2)  # fmt: skip
        train("--resume", run, "--max-steps", 6, "--allow-change", "max-steps",
              processes=processes)  # fmt: skip
        found.append(run)
    constant = out / "constant"
    train(*settings, "--schedule", "constant", "--max-steps", 6, "--out", constant)
    good = [compare(f"2 processes, {run.name}", constant, run) for run in found]
    return all(good)


def mlx(out: Path) -> bool:
    """One and two processes of MLX; two of torch, gone on with by two of MLX."""
    settings = [*COMMON, *ROWS[:2], *DROPOUT, "--schedule", "constant", "--max-steps"]
    for processes in (1, 2):
        train(*settings, 6, "--out", out / f"mlx-{processes}", processes=processes, backend=MLX)
    same = compare("mlx, 2 processes", out / "mlx-1", out / "mlx-2")
    without = [*COMMON, *ROWS[:2], "--schedule", "constant", "--max-steps"]
    train(*without, 6, "--out", out / "torch", processes=2)
    train(*without, 3, "--out", out / "then", processes=2)
    train("--resume", out / "then", "--max-steps", 6, "--allow-change", "max-steps",
          processes=2, backend=MLX)  # fmt: skip
    return compare("2 of torch, then 2 of mlx", out / "torch", out / "then") and same


def objectives(out: Path) -> bool:
    rows = [json.loads(line) for line in (DATA / "train.jsonl").read_text().splitlines()[:32]]
    pairs, prompts = out / "pairs.jsonl", out / "prompts.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    asked = [(row["messages"][0]["content"], row["messages"][-1]["content"]) for row in rows]
    pairs.write_text(
        "".join(
            json.dumps({"prompt": p, "chosen": a, "rejected": a[::-1]}) + "\n" for p, a in asked
        )
    )
    prompts.write_text(
        "".join(json.dumps({"prompt": p, "completion": "a"}) + "\n" for p, _ in asked)
    )
    reward = out / "reward.py"
    reward.write_text("def judge(row, answer):\n    return answer.count('e') / 10\n")
    cases = {
        "dpo": ["--objective", "dpo", "--data", pairs],
        "grpo": ["--objective", "grpo", "--data", prompts, "--reward", f"{reward}:judge",
                 "--rollouts", 4, "--rollout-tokens", 12],
    }  # fmt: skip
    good = []
    for name, case in cases.items():
        for processes in (1, 2):
            train(*COMMON, *case, "--max-steps", 3, "--out", out / f"{name}-{processes}",
                  processes=processes)  # fmt: skip
        good.append(compare(f"{name}, 2 processes", out / f"{name}-1", out / f"{name}-2"))
    return all(good)


HOW = ("SIGKILL", "SIGSTOP", "cut")
STEPS = 24


def killed(out: Path, count: int) -> bool:
    """Kill or stop a rank, or cut its connections, at a random moment; resume on one process."""
    from vox_testing.tiny import make_model

    model, draw = out / "model", random.Random(int.from_bytes(os.urandom(4)))
    make_model("llama", model)
    settings = ["--dtype", "fp32", "--allow-cpu", "--tune", "ignore",
                "--model", model, *ROWS[:2], *DROPOUT, "--batch-size", 8, "--seq-len", 256,
                "--micro-batch-tokens", 512, "--save-every", 1, "--keep", 3,
                "--max-steps", STEPS]  # fmt: skip
    seconds = train(*settings, "--out", out / "undisturbed", processes=2)
    good = hit = number = 0
    while hit < count:
        number += 1
        how, rank = draw.choice(HOW), draw.randrange(2)
        run, temporary = out / f"run-{number}", out / f"temporary-{number}"
        temporary.mkdir()
        before = shared_memory()
        # Half of the moments are while the ranks start; the steps are short on a tiny model.
        early = how != "cut" and draw.random() < 0.5
        moment = draw.uniform(0, seconds) if early else draw.randrange(STEPS)
        found = disturbed([*settings, "--out", run], run, temporary, rank, how, early, moment)
        if found is None:
            print(f"{number}: had ended before {moment:.1f} s", flush=True)
            shutil.rmtree(temporary)
            continue
        said, took, ranks = found
        left = [
            *(f"process {pid}" for pid in processes_of(run)),
            *map(str, shared_memory() - before),
            *(f"temporary file {path.name}" for path in temporary.iterdir()),
        ]
        hit += 1
        pids = [ranks[rank]] if how != "cut" else ranks
        named = "VOX-T006" in said and any(f"process {pid} on" in said for pid in pids)
        saved = max((int(p.name[5:]) for p in run.glob("checkpoints/step-*")), default=0)
        resume_here([*settings, "--out", run, "--resume", "auto"])
        names = [{p.relative_to(f) for p in f.rglob("*")} for f in (out / "undisturbed", run)]
        left += [f"file {name}" for name in names[1] - names[0] if name.parts[0] != "tensorboard"]
        # None if only the end of the run was left.
        again = min((e["first_step"] for e in events(run, "run_start")[1:]), default=saved + 1)
        when = f"{moment:.1f} s" if early else f"step {saved}"
        label = (
            f"{number}: rank {rank}, {how} at {when}, gone in {took:.1f} s, "
            f"{'named' if named else said}, left {left}, went on at step {again}"
        )
        same = compare(label, out / "undisturbed", run)
        good += same and took < 30 and named and not left and again == saved + 1
        shutil.rmtree(temporary)
    print(f"{good} of {count}")
    return good == count


def disturbed(
    arguments: list[object], run: Path, temporary: Path, rank: int, how: str, early: bool,
    moment: float,
) -> tuple[str, float, list[int]] | None:  # fmt: skip
    """Disturb a run of two ranks, `moment` seconds after they are there or after that many steps.

    Returns:
        What the launcher said, the seconds until it had ended, and the ranks' processes; None if it
        had ended before.
    """
    launcher = subprocess.Popen(
        [VOX, "train", *map(str, arguments), *CPU, "--processes", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = list[str]()
    reader = threading.Thread(target=lambda: lines.extend(launcher.stderr))
    reader.start()
    ranks = list[int]()
    while launcher.poll() is None and len(ranks) < 2:
        ranks = children(launcher.pid)
        time.sleep(0.02)
    if early:
        time.sleep(moment)
    else:
        while launcher.poll() is None and not (run / f"checkpoints/step-{moment}").exists():
            if moment == 0 and sockets_of(ranks[rank]):
                break
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
    try:
        if launcher.poll() is not None or len(ranks) < 2:
            return None
        if how == "cut":
            cut(ranks[rank])
        else:
            os.kill(ranks[rank], signal.Signals[how])
        began = time.monotonic()
        launcher.wait(60)
        took = time.monotonic() - began
    except (ProcessLookupError, FileNotFoundError):
        return None
    finally:
        launcher.wait(60)
        reader.join()
    return ("".join(lines), took, ranks) if launcher.returncode == 1 else None


RAY = ["--backend", "cpu", "--launcher", "ray"]


def ray(out: Path) -> bool:
    """Kill a rank, and a worker of Ray, in mid-run, on a cluster of `ray start`."""
    from vox_testing.tiny import make_model

    model = make_model("llama", out / "model")
    settings = ["--dtype", "fp32", "--allow-cpu", "--tune", "ignore", "--model", model, *ROWS[:2],
                *DROPOUT, "--batch-size", 8, "--seq-len", 256, "--micro-batch-tokens", 512,
                "--save-every", 5, "--max-steps", 60]  # fmt: skip
    train(*settings, "--out", out / "undisturbed", processes=2)
    before, temporary = shared_memory(), tempfile.mkdtemp(prefix="vox-")
    cluster = subprocess.Popen(
        [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block",
         "--temp-dir", temporary, "--include-dashboard=false", "--disable-usage-stats"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    while not list(Path(temporary).glob("session_latest/sockets/raylet*")):
        time.sleep(0.1)
    good = []
    for what in ("nothing", "rank", "worker"):
        run = out / what
        launcher = subprocess.Popen(
            [VOX, "train", *map(str, settings), *RAY, "--processes", "2", "--out", str(run)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        while what != "nothing" and not list(run.glob("checkpoints/step-*")):
            time.sleep(0.01)
        for pid in processes_of(run) if what != "nothing" else ():
            if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
                stat = Path(f"/proc/{pid}/stat").read_text()
                os.kill(pid if what == "rank" else int(stat.split()[3]), signal.SIGKILL)
        said = launcher.communicate()[1]
        left = [*processes_of(run), *out.glob(".vox-ray-*")]
        again = [int(e["first_step"]) for e in events(run, "run_start")]
        restarts = said.count("from the newest checkpoint")
        label = f"{what} killed: {restarts} restarts, run from steps {again}, left {left}"
        same = compare(label, out / "undisturbed", run)
        good.append(same and restarts == (what != "nothing") and not left)
    cluster.terminate()
    cluster.wait()
    shutil.rmtree(temporary)
    print(f"left after the cluster: {shared_memory() - before or 'nothing'}")
    return all(good)


def resume_here(arguments: list[object]) -> None:
    """Run `vox train` in this process, which has torch then."""
    from vox_core.cli import root
    from vox_core.errors import BackendError

    while True:
        nowhere = io.StringIO()
        with (
            contextlib.redirect_stderr(nowhere),
            contextlib.redirect_stdout(nowhere),
            contextlib.suppress(BackendError),  # a probe that did not end in 2 s on a busy machine
        ):
            root.main(["train", *map(str, arguments), *CPU], standalone_mode=False)
            return


def shared_memory() -> set[Path]:
    """Return the shared memory of torch and multiprocessing; others use the folder as well."""
    names = ("torch_", "psm_", "sem.", "mp-")
    return {path for path in Path("/dev/shm").iterdir() if path.name.startswith(names)}


def processes_of(run: Path) -> list[int]:
    """Return the processes whose arguments name a run."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and f"{run}\0".encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


def sockets_of(pid: int) -> list[int]:
    """Return the descriptors of a process that are sockets."""
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found += [int(entry.name)] if str(entry.readlink()).startswith("socket:") else []
    return found


def cut(pid: int) -> None:
    """Cut the TCP connections of another process."""
    owner, call = os.pidfd_open(pid), ctypes.CDLL(None).syscall
    for number in sockets_of(pid):
        copy = call(438, owner, number, 0)  # pidfd_getfd, which needs the right to trace it
        if copy < 0:
            continue
        with socket.socket(fileno=copy) as connection, contextlib.suppress(OSError):
            if connection.family == socket.AF_INET:
                connection.shutdown(socket.SHUT_RDWR)
    os.close(owner)


def children(pid: int) -> list[int]:
    """Return the ranks of a launcher, in order."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            environ = Path(f"/proc/{child}/environ").read_bytes()
            if match := re.search(rb"(?:^|\0)RANK=(\d+)", environ):
                found[int(match[1])] = child
    return [found[rank] for rank in sorted(found)]


def speed(out: Path) -> bool:
    """Compare two processes of one thread with one of two, by turns; count the bytes sent."""
    from vox_testing.tiny import make_model

    tiny = ["--model", make_model("llama", out / "tiny"), "--seq-len", 256]
    settings = [*COMMON[:-2], "--micro-batch-tokens", 512, "--batch-size", 16, *ROWS[:2]]
    good = []
    for name, steps, more in (("smollm2-135m", 4, []), ("tiny", 40, tiny)):
        rates: dict[int, list[float]] = {1: [], 2: []}
        for turn in range(3):
            for processes, threads in ((1, 2), (2, 1)):
                run, before = out / f"{name}-{processes}-{turn}", loopback()
                train(*settings, *more, "--max-steps", steps, "--out", run, processes=processes,
                      threads=threads)  # fmt: skip
                done = events(run, "step")[1:]
                rates[processes].append(
                    sum(e["tokens"] for e in done) / sum(e["seconds"] for e in done)
                )
        sent = (loopback() - before) / steps
        adapter = load_file(run / "adapter_model.safetensors").values()
        gradient = 4 * sum(value.size for value in adapter)
        one, two = (float(np.median(rates[n])) for n in (1, 2))
        print(
            f"{name}: tokens/s: 1 process of 2 threads {one:.0f}, 2 of 1 {two:.0f}: {two / one:.2f}"
            f"; bytes per step and rank {sent / 2e6:.2f} MB, gradient {gradient / 1e6:.2f} MB: "
            f"{sent / 2 / gradient:.3f}",
            flush=True,
        )
        good += [two >= 0.9 * one, abs(sent / 2 / gradient - 1) <= 0.1]
    return all(good)


SHAPE = {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32, "head_dim": 64,
         "num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": 49152,
         "tie_word_embeddings": True}  # fmt: skip
"""SmolLM2-360M's."""


def shard(out: Path) -> bool:
    """Compare with one process; measure the memory of ranks that hold a base of 360M."""
    from vox_testing.tiny import make_model

    tiny, good = make_model("llama", out / "tiny"), []
    for name, model, steps in (("tiny", ["--model", tiny], 20), ("smollm2-135m", [], 5)):
        settings = [*COMMON, *ROWS, *DROPOUT, *model, "--max-steps", steps]
        settings += ["--seq-len", 256, "--micro-batch-tokens", 512] if model else []
        train(*settings, "--out", out / f"{name}-1")
        train(*settings, "--shard", "--out", out / f"{name}-2", processes=2)
        good.append(compare(f"{name}, 2 processes", out / f"{name}-1", out / f"{name}-2"))
    return good[0] and good[1] and ranks_memory(out) <= 0.6


def full(out: Path) -> bool:
    """Train all weights, whole and in parts, and go on with a run in parts on other processes.

    Print the largest memory of rank 0, which its process had.
    """
    settings = [*COMMON, *ROWS[:2], "--method", "full", "--schedule", "constant"]
    runs = {"one": (1, []), "whole": (2, []), "parts": (2, ["--shard"]), "again": (2, ["--shard"])}
    for name, (processes, more) in runs.items():
        train(*settings, *more, "--max-steps", 4, "--out", out / name, processes=processes)
        largest = max(e["memory"] for e in events(out / name, "step"))
        print(f"{name}, {processes} processes: {largest / 1e9:.2f} GB on rank 0", flush=True)
    good = [compare("2 processes, whole", out / "one", out / "whole")]
    good += [compare("2 processes, split", out / "one", out / "parts", 1e-5)]
    good += [compare("2 processes, split, again", out / "parts", out / "again", 0)]
    train(*settings, "--shard", "--max-steps", 2, "--out", out / "half", processes=2)
    for processes, more in ((2, ["--shard"]), (3, ["--shard"]), (1, [])):
        run = out / f"then-{processes}"
        shutil.copytree(out / "half", run)
        train("--resume", run, *more, "--max-steps", 4, "--allow-change", "max-steps",
              processes=processes)  # fmt: skip
        label, limit = f"2 processes, split, {run.name}", 0 if processes == 2 else 1e-5
        good.append(compare(label, out / "parts", run, limit))
    return all(good)


def ranks_memory(out: Path) -> float:
    """Return the largest share of a base of 360M that one of two ranks holds between passes.

    Print RssAnon, then and at the most within a forward.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    base = LlamaForCausalLM(LlamaConfig(**SHAPE, bos_token_id=259, eos_token_id=258))
    size = sum(each.nbytes for each in base.parameters())
    base.save_pretrained(out / "base")
    del base
    work = partial(held, out / "base", out / "store")
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(work, range(2)))
    for rank, (resident, peak) in enumerate(found):
        print(
            f"rank {rank}: RssAnon of the base {resident / 1e6:.0f} of {size / 1e6:.0f} MB, "
            f"{resident / size:.3f}; in a forward {peak / 1e6:.0f} MB, {peak / size:.3f}"
        )
    return max(resident for resident, _ in found) / size


def held(base: Path, store: Path, rank: int) -> tuple[int, int]:
    """Load a rank's part of a base and compute a forward; return RssAnon after it, beyond that
    before, and the most while a layer computes."""
    import torch
    from torch.distributed.fsdp import fully_shard  # noqa: F401 (its memory is not the base's)
    from transformers import LlamaForCausalLM  # noqa: F401

    from vox_core.contract import World
    from vox_torch.ranks import RENDEZVOUS, Ranks
    from vox_torch.shards import Shards

    os.environ.update({RENDEZVOUS: str(store), "GLOO_SOCKET_IFNAME": "lo"})
    torch.set_num_threads(1)
    ranks, before = Ranks(World(rank, 2)), anonymous()
    model, seen = Shards(ranks).load(base, torch.float32), list[int]()
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: seen.append(anonymous() - before))
    with torch.no_grad():
        model(input_ids=torch.arange(64)[None], use_cache=False)
    resident = anonymous() - before
    ranks.close()
    return resident, max(seen)


def anonymous() -> int:
    """Return this process's RssAnon in bytes."""
    found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def loopback() -> int:
    """Return the bytes sent over the loopback interface so far."""
    found = re.search(r"lo:(.*)", Path("/proc/self/net/dev").read_text())
    assert found
    return int(found[1].split()[8])


if __name__ == "__main__":
    kind, folder, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    calls = {
        each.__name__: each for each in (equal, resumed, mlx, objectives, speed, ray, shard, full)
    }
    good = killed(Path(folder), int(rest[0])) if kind == "killed" else calls[kind](Path(folder))
    sys.exit(not good)

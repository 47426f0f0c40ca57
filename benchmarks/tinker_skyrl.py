"""`vox tinker serve` against skyrl-tx, the other open server of the Tinker API, on a CPU.

    python benchmarks/tinker_skyrl.py --skyrl SKYRL/bin/python [--model smollm2-135m]

`SKYRL/bin/python` is of an environment with `skyrl[tinker,jax]==0.4.0`, aiohttp (Python 3.12) and
uv. Each server answers the `tinker` SDK of its own environment, since skyrl speaks the protocol of
0.25.
One server at a time, by turns; tokens are divided by the seconds of whole requests, and by the
processor seconds of the server, which other load on the machine changes less. The first request of
each shape is not counted, because skyrl compiles then; it is printed. Memory is the peak of the
resident memory of all processes of the server (`VmHWM`).

    forward_backward   DOCUMENTS random documents of LENGTH tokens, cross_entropy, a request
    sample             DOCUMENTS samples of LENGTH tokens for a prompt of LENGTH tokens, a request
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

KEY = "tml-benchmark"


def measured(given: argparse.Namespace) -> dict[str, list[float]]:
    """Return by operation the seconds of the first request, and of the others tokens per second and
    per processor second."""
    import tinker  # of the server's environment
    from tinker import types

    def settled(made: Any) -> Any:
        """In 0.25, clients are no futures."""
        return made.result() if hasattr(made, "result") else made

    service = tinker.ServiceClient(base_url=given.client, api_key=KEY)
    client = settled(service.create_lora_training_client(base_model=given.name, rank=16))
    made, count, length = random.Random(0), given.documents, given.length

    def datum() -> types.Datum:
        tokens = [made.randrange(200) for _ in range(length + 1)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs
        )

    def passed() -> int:
        client.forward_backward([datum() for _ in range(count)], "cross_entropy").result()
        return count * length

    def sampled() -> int:
        prompt = types.ModelInput.from_ints([made.randrange(200) for _ in range(length)])
        params = types.SamplingParams(max_tokens=length, temperature=1.0, seed=made.randrange(999))
        found = sampler.sample(prompt, count, params).result()
        return sum(len(each.tokens) for each in found.sequences)

    def rates(request: Callable[[], int]) -> list[float]:
        began = time.perf_counter()
        request()
        first = time.perf_counter() - began
        began, busy = time.perf_counter(), processor_seconds(given.server)
        tokens = sum(request() for _ in range(given.requests))
        took = time.perf_counter() - began, processor_seconds(given.server) - busy
        return [first, tokens / took[0], tokens / took[1]]

    found = {"forward_backward": rates(passed)}
    client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
    sampler = settled(client.save_weights_and_get_sampling_client())
    return {**found, "sample": rates(sampled)}


def tree(pid: int) -> list[Path]:
    """Return the folders in /proc of a process and of all below it."""
    found = [Path(f"/proc/{pid}")]
    for thread in found[0].glob("task/*/children"):
        found += [path for each in thread.read_text().split() for path in tree(int(each))]
    return found


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and all below it have used."""
    stats = [(each / "stat").read_text().rpartition(")")[2].split() for each in tree(pid)]
    return sum(int(each[11]) + int(each[12]) for each in stats) / os.sysconf("SC_CLK_TCK")


def peak(pid: int) -> int:
    """Return the peaks of resident memory of a process and of all below it, in MB."""
    status = [line for each in tree(pid) for line in (each / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024


@contextmanager
def server(command: list[str], url: str, environment: dict[str, str]) -> Iterator[int]:
    """Start a server, wait until it answers, and yield its process id."""
    host, port = url.removeprefix("http://").split(":")
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as started,
    ):
        try:
            while started.poll() is None:
                try:
                    socket.create_connection((host, int(port))).close()
                    break
                except OSError:
                    time.sleep(0.2)
            else:
                log.seek(0)
                sys.exit(log.read().decode())
            yield started.pid
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode())
            raise
        finally:
            started.terminate()


def turn(which: str, given: argparse.Namespace, folder: Path) -> tuple[dict[str, list[float]], int]:
    """Return what `measured` does, and the memory, of a new server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    python = sys.executable if which == "vox" else given.skyrl
    port, environment = url.rpartition(":")[2], {**os.environ, "TINKER_TELEMETRY": "0"}
    if which == "vox":
        name, model = "base", folder if given.model == "tiny" else given.model
        command = [
            python, "-m", "vox_core.cli", "tinker", "serve", "--model", f"{name}={model}",
            "--backend", "cpu", "--dtype", given.dtype, "--port", port, "--out", f"{folder}-runs",
        ]  # fmt: skip
    else:
        name = str(folder)  # skyrl starts its engine by `uv run`, in the environment of VIRTUAL_ENV
        environment |= {"VIRTUAL_ENV": str(Path(python).parents[1]), "JAX_PLATFORMS": "cpu"}
        environment["PATH"] = f"{Path(given.uv).parent}:{environment['PATH']}"
        options = {"max_lora_adapters": 2, "max_lora_rank": 16}  # its defaults, 32, are slower
        command = [
            given.uv, "run", "--active", "--no-project", "-m", "skyrl.tinker.api",
            "--base-model", name, "--backend", "jax", "--backend-config", json.dumps(options),
            "--host", "127.0.0.1", "--port", port, "--checkpoints-base", f"{folder}-skyrl",
            "--database-url", f"sqlite:///{folder}-skyrl.db",
        ]  # fmt: skip
    with server(command, url, environment) as pid:
        asked = [python, __file__, "--client", url, "--name", name, "--server", str(pid)]
        for option in ("documents", "length", "requests"):
            asked += [f"--{option}", str(getattr(given, option))]
        found = subprocess.run(asked, env=environment, stdout=subprocess.PIPE, check=True)
        return json.loads(found.stdout.splitlines()[-1]), peak(pid)


def copied(model: str, dtype: str, folder: Path) -> Path:
    """Make a folder of a model whose configuration has a dtype, which skyrl goes by."""
    if model == "tiny":
        from vox_testing.tiny import make_model

        return make_model("llama", folder / "tiny")
    from vox_core.api.models import resolve_reference

    found, made = Path(resolve_reference(model).base.path), folder / "model"
    made.mkdir()
    for each in found.iterdir():
        (made / each.name).symlink_to(each.resolve())
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").unlink()
    config |= {"torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype]}
    config.pop("dtype", None)
    (made / "config.json").write_text(json.dumps(config))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--skyrl", help="Python of skyrl's environment")
    parser.add_argument("--uv", default=str(Path(sys.executable).with_name("uv")))
    parser.add_argument("--model", default="tiny", help="tiny, or any model that vox loads")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--requests", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    parser.add_argument("--server", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        print(json.dumps(measured(given)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = copied(given.model, given.dtype, Path(scratch))
        found = {"vox": [], "skyrl": []}
        for _ in range(given.turns):
            for which, turns in found.items():
                turns.append(turn(which, given, folder))
                print(which, turns[-1], file=sys.stderr, flush=True)
    for operation in ("forward_backward", "sample"):
        firsts = {each: min(t[operation][0] for t, _ in turns) for each, turns in found.items()}
        print(
            f"{given.model}, {given.dtype}, {operation}, "
            f"{given.documents} of {given.length} tokens,"
            f" first one: vox {firsts['vox']:.1f} s, skyrl {firsts['skyrl']:.1f}"
        )
        for number, unit in ((1, "second"), (2, "processor second")):
            vox, skyrl = ([t[operation][number] for t, _ in turns] for turns in found.values())
            ratios = [a / b for a, b in zip(vox, skyrl, strict=True)]
            print(
                f"    tokens per {unit}: vox {statistics.median(vox):.0f}, skyrl "
                f"{statistics.median(skyrl):.0f}, {statistics.median(ratios):.2f} times "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
    memory = {which: max(m for _, m in turns) for which, turns in found.items()}
    print(f"memory: vox {memory['vox']} MB, skyrl {memory['skyrl']} MB")


if __name__ == "__main__":
    main()

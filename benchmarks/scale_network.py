"""The sum of gradients between ranks that have a network interface each, against the model.

    python -m benchmarks.scale_network [MBIT]

For 2, 4 and 8 ranks on this machine: one network namespace per rank, joined by a bridge, at MBIT
(1,000 by default) megabits per second each way. Needs Linux, root, `ip`, `tc` and `unshare`; the
namespaces end with their processes. Times 40 MB in the pieces that vox sends and as one piece, and
compares them with `Wire.chain` of benchmarks/scale.py.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.scale import SIZE, Wire, timed_sums
from vox_torch import ranks

RANK = """
while ! ip link show e0 >/dev/null 2>&1; do sleep 0.05; done
ip addr add 10.0.0.$1/24 dev e0; ip link set e0 up; ip link set lo up; {shape}
exec "$2" -m benchmarks.scale_network "$3" "$4" "$5"
"""
SHAPE = "tc qdisc add dev {device} root tbf rate {rate}mbit burst 256kb latency 50ms"


def run(*command: object) -> None:
    subprocess.run([*map(str, command)], check=True)


def network(rate: int) -> None:
    """Measure, in a network namespace of its own."""
    run("ip", "link", "add", "name", "sw0", "type", "bridge")
    run("ip", "link", "set", "dev", "sw0", "up")
    for processes in (2, 4, 8):
        with tempfile.TemporaryDirectory() as folder:
            started = [start(rate, processes, rank, folder) for rank in range(processes)]
            said = [json.loads(each.communicate()[0]) for each in started]
        latency, whole, pieces = (max(times) for times in zip(*said, strict=True))
        wire = Wire(latency / 2 / (processes - 1), rate * 1e6 / 8, math.inf)
        for name, took, size in (("one piece", whole, SIZE), ("pieces", pieces, ranks.PIECE * 4)):
            predicted = wire.chain(SIZE, [0] * processes, piece_bytes=size)
            print(f"{processes} ranks, {SIZE / 1e6:.0f} MB, {name}: predicted {predicted:.2f} s, "
                  f"measured {took:.2f} s, {predicted / took - 1:+.1%}", flush=True)  # fmt: skip


def start(rate: int, processes: int, rank: int, folder: str) -> subprocess.Popen[bytes]:
    """Start a rank in a namespace of its own, and join that to the bridge."""
    device = f"v{processes}-{rank}"
    script = RANK.format(shape=SHAPE.format(device="e0", rate=rate))
    given = [str(rank + 1), sys.executable, str(processes), str(rank), f"{folder}/store"]
    child = subprocess.Popen(
        ["unshare", "-n", "bash", "-c", script, "rank", *given], stdout=subprocess.PIPE
    )
    while Path(f"/proc/{child.pid}/ns/net").readlink() == Path("/proc/self/ns/net").readlink():
        time.sleep(0.01)
    run("ip", "link", "add", device, "type", "veth", "peer", "name", "e0", "netns", child.pid)
    run("ip", "link", "set", device, "master", "sw0", "up")
    run(*SHAPE.format(device=device, rate=rate).split())
    return child


def one(processes: int, rank: int, store: Path) -> list[float]:
    """The seconds of few bytes, of many in one piece, and in pieces."""
    cases = [(4096, 0, ranks.PIECE), (SIZE, 0, SIZE), (SIZE, 0, ranks.PIECE)]
    return timed_sums(store, processes, rank, cases, interface="e0", times=4)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [processes, rank, store]:
            print(json.dumps(one(int(processes), int(rank), Path(store))))
        case ["inside", rate]:
            network(int(rate))
        case rest:
            rate = rest[0] if rest else "1000"
            run("unshare", "-n", sys.executable, "-m", "benchmarks.scale_network", "inside", rate)

"""`vox train --emit`: the same command as a job for Slurm, Kubernetes or SkyPilot.

All processes of a job are on one machine, which the launcher starts there. A job that is started
again goes on from its newest checkpoint. Memory is the forecast of `vox plan`, and a tenth.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template

from vox_core.api.host import cpus
from vox_core.api.plans import TrainSettings
from vox_core.contract import LaunchJob
from vox_core.errors import ConfigError, PlanError
from vox_plan import planner
from vox_plan.memory_forecast import SPARE

_SLURM = Template("""\
#!/bin/bash
#SBATCH --job-name=vox-train
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=$cpus
#SBATCH --mem=${memory}M
#SBATCH --chdir=$folder
#SBATCH --output=vox-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:INT@120$time
# Two minutes before the end of its time vox finishes the step and saves.
export OMP_NUM_THREADS=$threads
exec $line
""")

_KUBERNETES = Template("""\
apiVersion: batch/v1
kind: Job
metadata:
  name: vox-train
  labels: {app.kubernetes.io/name: vox-train}
spec:
  backoffLimit: 3
  template:
    metadata:
      labels: {app.kubernetes.io/name: vox-train}
    spec:
      restartPolicy: OnFailure
      terminationGracePeriodSeconds: 300
      securityContext:
        runAsNonRoot: true
        seccompProfile: {type: RuntimeDefault}
      containers:
      - name: vox-train
        image: $image
        command: $command
        workingDir: /work
        env:
        - {name: OMP_NUM_THREADS, value: "$threads"}
        - {name: XDG_CACHE_HOME, value: /work/.cache}
        resources:
          requests: {cpu: "$cpus", memory: ${memory}Mi}
          limits: {memory: ${memory}Mi}
        securityContext:
          allowPrivilegeEscalation: false
          capabilities: {drop: [ALL]}
          readOnlyRootFilesystem: true
        volumeMounts:
        - {name: work, mountPath: /work}
        - {name: temporary, mountPath: /tmp}
      volumes:
      - name: work
        persistentVolumeClaim: {claimName: vox-work}
      - name: temporary
        emptyDir: {}
""")

_SKYPILOT = Template("""\
name: vox-train
workdir: .
resources:
  cpus: $cpus+
  memory: $gigabytes+
  image_id: $docker
envs:
  OMP_NUM_THREADS: "$threads"
run: $run
""")


def write_job(kind: str, job: LaunchJob, settings: TrainSettings, image: str | None) -> str:
    """Return the file of a job.

    Args:
        image: a container image that has vox; Slurm needs none.

    Raises:
        InputError: what train would refuse, or what the job's machine could not have.
    """
    contained = kind != "slurm"
    _require(settings, image, contained)
    report = planner.plan(settings.model_copy(update={"resume": settings.resume or "auto"}))
    if report.backend.id != "cpu":
        raise PlanError(
            "P001",
            "jobs are written for the backend cpu alone",
            where=f"--emit {kind}",
            found=f"backend {report.backend.id}",
            remedy="add --backend cpu, or write the job by hand",
        )
    again = () if settings.resume else ("--resume", "auto")
    command = ["vox", *job.arguments, *again]
    threads = max(1, cpus() // job.processes)
    needed = report.memory.peak * job.processes * (1 + SPARE)
    line = shlex.join(command)
    minutes = math.ceil(settings.max_time / 60) + 5 if settings.max_time else 0
    template = {"slurm": _SLURM, "kubernetes": _KUBERNETES, "skypilot": _SKYPILOT}[kind]
    return template.substitute(
        command=json.dumps(command),
        cpus=threads * job.processes,
        docker=json.dumps(f"docker:{image}"),
        folder=shlex.quote(str(Path.cwd())),
        gigabytes=math.ceil(needed / 1e9),
        image=json.dumps(image),
        line=line,
        memory=math.ceil(needed / 2**20),
        run=json.dumps(f"exec {line}"),
        threads=threads,
        time=f"\n#SBATCH --time={minutes}" if minutes else "",
    )


def _require(settings: TrainSettings, image: str | None, contained: bool) -> None:
    if settings.resume is None and settings.out is None:
        raise ConfigError(
            "C004",
            "a job that is started again has to find its run",
            where="--emit",
            expected="--out",
            remedy="name the run folder with --out",
        )
    if contained and image is None:
        raise ConfigError(
            "C004",
            "the job needs a container image that has vox",
            where="--image",
            remedy="name one: --image registry.example/vox:1",
        )
    if image and not contained:
        raise ConfigError(
            "C004",
            "a Slurm job runs vox as it is installed on the cluster, in no container",
            where="--image",
            found=image,
            remedy="leave out --image",
        )
    for flag, path in _paths(settings) if contained else ():
        if path.is_absolute() or ".." in path.parts:
            raise ConfigError(
                "C004",
                "a container does not have the paths of this machine",
                where=flag,
                found=path,
                expected="a path inside the current folder, which the container has as well",
                remedy="give the path relative to the folder that goes with the job",
            )


def _paths(settings: TrainSettings) -> Iterator[tuple[str, Path]]:
    """Return flags and the paths that they name."""
    for name, value in settings:
        flag = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, Path):
                yield flag, each
    if Path(settings.model).exists():
        yield "--model", Path(settings.model)

"""`vox train --emit`: what a job runs, and the validators of Kubernetes and SkyPilot."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable

import pytest
import yaml

IMAGE = ("--image", "registry.example/vox:1")
JOB = ("--backend", "cpu", "--allow-cpu", "--out", "runs/a b", "--processes", "2")


@pytest.fixture
def emitted(vox, tiny, data, monkeypatch, tmp_path) -> Callable[..., str]:
    """`emitted(kind, *arguments)` -> the file, made in a folder that has the model and the data."""
    (tmp_path / "model").symlink_to(tiny("llama"))
    monkeypatch.chdir(tmp_path)

    def emit(kind: str, *more: str) -> str:
        image = () if kind == "slurm" else IMAGE
        given = ["train", data.name, "--model", "model", *JOB, *more, "--emit", kind, *image]
        monkeypatch.setattr("sys.argv", ["vox", *given])
        done = vox(*given)
        assert done.code == 0, done.err
        return done.out

    return emit


EXPECTED = ["vox", "train", "data", "--model", "model", *JOB, "--resume", "auto"]


def test_slurm_runs_the_command_and_stops_it_before_the_end_of_its_time(emitted, tmp_path):
    text = emitted("slurm", "--max-time", "90m")
    subprocess.run(["bash", "-n"], input=text.encode(), check=True)
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    options = dict(
        line[8:].split("=") for line in lines if line.startswith("#SBATCH ") and "=" in line
    )
    assert options.keys() == {
        *("--job-name", "--nodes", "--ntasks", "--cpus-per-task", "--mem", "--chdir", "--output"),
        *("--open-mode", "--signal", "--time"),
    }
    assert (options["--chdir"], options["--time"]) == (str(tmp_path), "95")
    assert "#SBATCH --requeue" in lines
    with_time = [*EXPECTED[:-2], "--max-time", "90m", *EXPECTED[-2:]]
    assert lines[-1] == shlex.join(["exec", *with_time])
    assert "--time" not in emitted("slurm")


@pytest.mark.parametrize("kind", ["slurm", "skypilot", "kubernetes"])
def test_arguments_with_blank_lines_arrive_unchanged(emitted, kind):
    text = emitted(kind, "--out", "runs/a\n\nb")
    if kind == "slurm":
        words = shlex.split(text.partition("\nexec ")[2])
        assert "\n\n" not in text.partition("\nexec ")[0]
    elif kind == "skypilot":
        words = shlex.split(yaml.safe_load(text)["run"])[1:]
    else:
        job = yaml.safe_load(text)
        words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words == [*EXPECTED[:-2], "--out", "runs/a\n\nb", *EXPECTED[-2:]]


def test_kubernetes_runs_the_command_in_the_volume(emitted):
    job = yaml.safe_load(emitted("kubernetes"))
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (container["command"], container["image"]) == (EXPECTED, IMAGE[1])
    assert container["resources"]["requests"]["memory"].endswith("Mi")
    validator = pytest.importorskip("kubernetes_validate")
    version = validator.latest_version()
    validator.validate(job, version, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate({**job, "spec": {"wrong": 1}}, version, strict=True)


def test_skypilot_runs_the_command_in_the_folder(emitted, tmp_path):
    text = emitted("skypilot")
    task = yaml.safe_load(text)
    assert shlex.split(task["run"]) == ["exec", *EXPECTED]
    assert (task["workdir"], task["resources"]["image_id"]) == (".", f"docker:{IMAGE[1]}")
    sky = pytest.importorskip("sky")
    (tmp_path / "task.yaml").write_text(text)
    sky.Task.from_yaml(str(tmp_path / "task.yaml")).validate()


def test_memory_is_that_of_all_processes(emitted):
    one, two = (
        float(yaml.safe_load(emitted("kubernetes", "--processes", n))["spec"]["template"]["spec"][
            "containers"][0]["resources"]["requests"]["memory"][:-2])
        for n in "12"
    )  # fmt: skip
    assert 1.9 < two / one < 2.1


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (("--emit", "kubernetes"), "--image"),
        (("--emit", "slurm", *IMAGE), "--image"),
        (("--emit", "skypilot", *IMAGE, "--valid", "/rows.jsonl"), "--valid"),
        (("--emit", "skypilot", *IMAGE, "--data", "../rows.jsonl"), "--data"),
    ],
)
def test_what_the_job_s_machine_cannot_have_is_refused(vox, given, where):
    done = vox("train", "--model", "m", "--out", "runs/a", *given)
    assert (done.code, done.out) == (2, "")
    assert "error[VOX-C004]" in done.err
    assert f"where:    {where}" in done.err


def test_a_job_needs_a_run_folder_that_it_finds_again(vox):
    done = vox("train", "rows.jsonl", "--model", "m", "--emit", "slurm")
    assert done.code == 2
    assert "name the run folder with --out" in done.err


def test_an_unknown_kind(vox):
    done = vox("train", "rows.jsonl", "--model", "m", "--out", "runs/a", "--emit", "cobol")
    assert done.code == 2
    assert "VOX-B013" in done.err

"""Layers by import-linter, declared dependencies, and that importing the core does nothing.

The contracts stand in pyproject.toml; imports in functions count. One fresh interpreter imports
every module of the core and reports what that changed in the process.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "vox_core": ROOT / "vox_core",
    "vox_formats": ROOT / "libs/vox_formats/vox_formats",
    "vox_torch": ROOT / "libs/vox_torch/vox_torch",
    "vox_cpu": ROOT / "plugins/vox_cpu/vox_cpu",
    "vox_cuda": ROOT / "plugins/vox_cuda/vox_cuda",
    "vox_mlx": ROOT / "plugins/vox_mlx/vox_mlx",
    "vox_tensorboard": ROOT / "plugins/vox_tensorboard/vox_tensorboard",
    "vox_wandb": ROOT / "plugins/vox_wandb/vox_wandb",
    "vox_objectives": ROOT / "plugins/vox_objectives/vox_objectives",
    "vox_eval": ROOT / "plugins/vox_eval/vox_eval",
    "vox_scorers": ROOT / "plugins/vox_scorers/vox_scorers",
    "vox_export": ROOT / "plugins/vox_export/vox_export",
    "vox_plan": ROOT / "plugins/vox_plan/vox_plan",
    "vox_runs": ROOT / "plugins/vox_runs/vox_runs",
    "vox_engines": ROOT / "plugins/vox_engines/vox_engines",
    "vox_serve": ROOT / "plugins/vox_serve/vox_serve",
    "vox_tinker": ROOT / "plugins/vox_tinker/vox_tinker",
    "vox_ray": ROOT / "plugins/vox_ray/vox_ray",
    "vox_data": ROOT / "plugins/vox_data/vox_data",
    "vox_bundle": ROOT / "plugins/vox_bundle/vox_bundle",
    "vox_extract": ROOT / "plugins/vox_extract/vox_extract",
    "vox_hub": ROOT / "plugins/vox_hub/vox_hub",
    "vox_scratch": ROOT / "plugins/vox_scratch/vox_scratch",
    "vox_testing": ROOT / "libs/vox_testing/vox_testing",
}

TENSOR_LIBRARIES = {"torch", "mlx", "mlx_lm", "bitsandbytes", "peft", "accelerate", "jax"}

VENDORS = re.compile(
    r"nvidia|cuda|amd\b|rocm|\bhip\b|intel\b|\bxpu\b|apple|\bmps\b|\bmetal\b", re.I
)

# `_typeshed` exists for type checkers only.
STANDARD = sys.stdlib_module_names | {"_typeshed"}
# Imported name -> the distribution that brings it, where they differ.
BROUGHT_BY = {
    "vox_core": "vox-ml",
    "vox_formats": "vox-ml-formats",
    "vox_eval": "vox-ml-eval",
    "vox_plan": "vox-ml-plan",
    "vox_serve": "vox-ml-serve",
    "vox_torch": "vox-ml-torch",
    "pydantic_core": "pydantic",
    "griffe": "griffelib",
    "markdown_it": "markdown-it-py",
    "google": "protobuf",
    "yaml": "pyyaml",
}


@dataclass(frozen=True)
class Import:
    importer: str
    target: str
    place: str


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(package: Path) -> Iterator[Import]:
    """Every import statement, and every `import_module` or `__import__` of a literal."""
    for file in sorted(package.rglob("*.py")):
        importer = module_name(file, package)
        for node in ast.walk(ast.parse(file.read_text(), file)):
            for target in targets(node):
                assert isinstance(node, ast.stmt | ast.expr)
                yield Import(
                    importer, target, f"{package.name}/{file.relative_to(package)}:{node.lineno}"
                )


def targets(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(level=level, module=module, names=names):
            return [f"{'.' * level}{module or ''}.{alias.name}" for alias in names]
        case ast.Call(
            func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]
        ):
            return [name]
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
        case _:
            return []


def test_layers_and_independence() -> None:
    """The contracts of import-linter in pyproject.toml."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    path = {**os.environ, "PYTHONPATH": str(PACKAGES["vox_ray"].parent)}  # is not installed
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stdout[done.stdout.find("Broken contracts") :]
    assert "0 broken" in done.stdout


def test_no_import_is_relative() -> None:
    found = [
        found.place
        for package in PACKAGES.values()
        for found in imports_of(package)
        if found.target.startswith(".")
    ]
    assert found == []


def test_the_engine_names_no_vendor() -> None:
    named = [
        f"{file.name}:{number}: {line.strip()}"
        for file in sorted(PACKAGES["vox_torch"].rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if VENDORS.search(line)
    ]
    assert not named, "\n".join(named)


@pytest.mark.parametrize("name", PACKAGES)
def test_dependencies_are_those_imported(name: str) -> None:
    """What is imported is declared, and what is declared is imported."""
    package = PACKAGES[name]
    roots = {found.target.split(".")[0] for found in imports_of(package)}
    used = {distribution_of(root) for root in roots - STANDARD - {name}}
    project = tomllib.loads((package.parent / "pyproject.toml").read_text())["project"]
    required = distributions(project["dependencies"])
    optional = distributions(chain(*project.get("optional-dependencies", {}).values()))
    assert used - required - optional == set(), "imported, not declared"
    assert required - used == set(), "declared, not imported"


def distribution_of(root: str) -> str:
    return canonicalize_name(BROUGHT_BY.get(root, root))


def distributions(requirements: Iterable[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


PROBE = """
import importlib, json, logging, os, pathlib, signal, sys, threading

def state():
    ours = [name for name in logging.root.manager.loggerDict if name.startswith("vox")]
    loggers = [logging.getLogger(name) for name in [None, *ours]]
    return {
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "handlers": [(log.name, str(log.handlers)) for log in loggers if log.handlers],
        "log levels": (logging.root.level, logging.root.manager.disable),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "threads": threading.active_count(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "tensor libraries": sorted(set(banned) & set(sys.modules)),
    }

report, banned, modules = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
before, effects = state(), {}
for module in modules:
    importlib.import_module(module)
    after = state()
    if changed := {key: after[key] for key in after if after[key] != before[key]}:
        effects[module] = changed
    before = after
pathlib.Path(report).write_text(json.dumps(effects))
"""


def effects_of_importing(modules: list[str], folder: Path, root: Path = ROOT) -> dict[str, object]:
    """What each module changed in a fresh interpreter; it must print nothing as well."""
    banned = sorted(TENSOR_LIBRARIES | {"vox_torch", "vox_cpu"})
    script, report = folder / "probe.py", folder / "report.json"
    script.write_text(f"import sys; sys.path.insert(0, {str(root)!r})\n{PROBE}")
    command = [sys.executable, str(script), str(report), json.dumps(banned), json.dumps(modules)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
    effects: dict[str, object] = json.loads(report.read_text())
    return effects


def test_importing_the_core_does_nothing(tmp_path: Path) -> None:
    package = PACKAGES["vox_core"]
    modules = sorted(module_name(file, package) for file in package.rglob("*.py"))
    assert effects_of_importing(modules, tmp_path) == {}


def test_a_side_effect_is_seen(tmp_path: Path) -> None:
    (tmp_path / "peft.py").touch()
    (tmp_path / "noisy.py").write_text("import logging, peft\nlogging.basicConfig()\n")
    effects = effects_of_importing(["noisy"], tmp_path, root=tmp_path)
    assert {"handlers", "tensor libraries"} <= effects["noisy"].keys()  # type: ignore[attr-defined]

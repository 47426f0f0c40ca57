"""Who may import whom, and that importing does nothing.

The tables below are DESIGN's import rules as data. Each source file is parsed (function-level and
type-only imports count too) and held against them; a module that is in no table is a failure. Then
one fresh interpreter imports every module of the core and reports what that did to the process.

Not here: how quick `vox --help` is (test_startup.py), style (ruff).
"""

from __future__ import annotations

import ast
import json
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

# From the bottom up; a module imports from rows below its own. `vox_core` is the package itself.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"vox_core"}),
    frozenset({"bounded_json", "errors", "links", "quickstart", "disk", "text"}),
    frozenset({"files"}),
    frozenset({"contract", "cache"}),
    frozenset({"hashes"}),
    frozenset({"hookspecs", "catalog", "config", "weights", "adapter", "display"}),
    frozenset({"digests", "known"}),
    frozenset({"host"}),
    frozenset({"data"}),
    frozenset({"models"}),
    frozenset({"install"}),
    frozenset({"run"}),
    frozenset({"library"}),
    frozenset({"cli"}),
    frozenset({"api"}),
)
# Within one row: (importer, imported).
BESIDE = {
    ("adapter", "weights"),
    ("vox_core", "library"),  # the public names, imported when they are used
}

LEVEL = {unit: level for level, row in enumerate(LAYERS) for unit in row}

# What each of our packages may import of our other packages.
PLUGIN_CORE = {
    "vox_formats",
    "vox_core.errors",
    "vox_core.contract",
    "vox_core.hookspecs",
    "vox_core.adapter",
    "vox_core.weights",
}
FEATURE_CORE = {"vox_core.errors", "vox_core.contract", "vox_core.hookspecs", "vox_core.api"}
ALLOWED_OF_OURS: dict[str, set[str]] = {
    "vox_core": {"vox_core", "vox_formats"},
    "vox_formats": {"vox_formats"},
    "vox_torch": {"vox_torch", *PLUGIN_CORE} - {"vox_core.hookspecs"},
    "vox_cpu": {"vox_cpu", "vox_torch", *PLUGIN_CORE},
    "vox_cuda": {"vox_cuda", "vox_torch", *PLUGIN_CORE},
    "vox_mlx": {"vox_mlx", *PLUGIN_CORE},
    "vox_tensorboard": {"vox_tensorboard", *PLUGIN_CORE},
    "vox_export": {"vox_export", "vox_formats", *FEATURE_CORE},
    "vox_plan": {"vox_plan", *FEATURE_CORE},
    "vox_runs": {"vox_runs", *FEATURE_CORE},
    "vox_data": {"vox_data", *FEATURE_CORE},
    "vox_extract": {"vox_extract", *FEATURE_CORE},
    "vox_testing": {"vox_testing", "vox_core.api", *PLUGIN_CORE},
}
PACKAGES = {
    "vox_core": ROOT / "vox_core",
    "vox_formats": ROOT / "libs/vox_formats/vox_formats",
    "vox_torch": ROOT / "libs/vox_torch/vox_torch",
    "vox_cpu": ROOT / "plugins/vox_cpu/vox_cpu",
    "vox_cuda": ROOT / "plugins/vox_cuda/vox_cuda",
    "vox_mlx": ROOT / "plugins/vox_mlx/vox_mlx",
    "vox_tensorboard": ROOT / "plugins/vox_tensorboard/vox_tensorboard",
    "vox_export": ROOT / "plugins/vox_export/vox_export",
    "vox_plan": ROOT / "plugins/vox_plan/vox_plan",
    "vox_runs": ROOT / "plugins/vox_runs/vox_runs",
    "vox_data": ROOT / "plugins/vox_data/vox_data",
    "vox_extract": ROOT / "plugins/vox_extract/vox_extract",
    "vox_testing": ROOT / "libs/vox_testing/vox_testing",
}

TENSOR_LIBRARIES = {"torch", "mlx", "mlx_lm", "bitsandbytes", "peft", "accelerate", "jax"}
BANNED: dict[str, set[str]] = {
    "vox_core": TENSOR_LIBRARIES,
    "vox_formats": {*TENSOR_LIBRARIES, "transformers"},
    "vox_torch": {"pluggy", "mlx", "mlx_lm"},
    "vox_cpu": {"bitsandbytes", "mlx", "mlx_lm"},
    "vox_cuda": {"mlx", "mlx_lm"},
    "vox_mlx": {"bitsandbytes", "torch", "peft", "accelerate"},
    "vox_tensorboard": {*TENSOR_LIBRARIES, "tensorflow"},
    "vox_export": TENSOR_LIBRARIES,
    "vox_plan": TENSOR_LIBRARIES,
    "vox_runs": TENSOR_LIBRARIES,
    "vox_data": TENSOR_LIBRARIES,
    "vox_extract": TENSOR_LIBRARIES,
    "vox_testing": TENSOR_LIBRARIES - {"torch"},  # of the float64 reference
}

VENDORS = re.compile(
    r"nvidia|cuda|amd\b|rocm|\bhip\b|intel\b|\bxpu\b|apple|\bmps\b|\bmetal\b", re.I
)

# `_typeshed` exists for type checkers only.
STANDARD = sys.stdlib_module_names | {"_typeshed"}
# Imported name -> the distribution that brings it, where they differ.
BROUGHT_BY = {
    "vox_core": "vox-ml",
    "vox_formats": "vox-ml-formats",
    "vox_torch": "vox-ml-torch",
    "pydantic_core": "pydantic",
    "griffe": "griffelib",
    "markdown_it": "markdown-it-py",
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


def within(target: str, names: set[str]) -> bool:
    return any(target == name or target.startswith(f"{name}.") for name in names)


def unit(target: str) -> str:
    """The part of the core that a dotted name belongs to: `vox_core.run.train` is in `run`."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else "vox_core"


def faults(name: str, package: Path) -> list[str]:
    """Every import in `package` that the tables above do not allow."""
    return [
        f"{found.place}: {found.importer} imports {found.target}: {reason}"
        for found in imports_of(package)
        if (reason := objection(name, found))
    ]


def objection(name: str, found: Import) -> str | None:
    if found.target.startswith("."):
        return "relative"
    if within(found.target, BANNED[name]):
        return f"banned in {name}"
    if found.target.startswith("vox_") and not within(found.target, ALLOWED_OF_OURS[name]):
        return f"{name} may import only {sorted(ALLOWED_OF_OURS[name])}"
    if name == "vox_core" and found.target.startswith("vox_core"):
        return against_the_layers(unit(found.importer), unit(found.target))
    return None


def against_the_layers(importer: str, imported: str) -> str | None:
    allowed = LEVEL[imported] < LEVEL[importer]
    if allowed or imported == importer or (importer, imported) in BESIDE:
        return None
    return f"{imported} is not below {importer}"


@pytest.mark.parametrize("name", PACKAGES)
def test_imports_go_one_way(name: str) -> None:
    found = faults(name, PACKAGES[name])
    assert not found, "\n".join(found)


def test_every_module_of_the_core_has_a_layer() -> None:
    package = PACKAGES["vox_core"]
    modules = {module_name(file, package) for file in package.rglob("*.py")} - {"vox_core"}
    assert {module.split(".")[1] for module in modules} - LEVEL.keys() == set()


VIOLATIONS = {
    "upwards": ("errors.py", "import vox_core.contract", "contract is not below errors"),
    "upwards, by name": ("run/a.py", "from vox_core import cli", "cli is not below run"),
    "sideways": ("host/a.py", "from vox_core.models import find", "models is not below host"),
    "in a function": ("run/a.py", "def f():\n    import torch", "banned in vox_core"),
    "for types": ("run/a.py", "if TYPE_CHECKING:\n    from peft import X", "banned in vox_core"),
    "by string": ("run/a.py", "importlib.import_module('mlx.core')", "banned in vox_core"),
    "a plugin": ("host/a.py", "import vox_cpu", "may import only"),
    "relative": ("run/a.py", "from . import b", "relative"),
}


@pytest.mark.parametrize("case", VIOLATIONS)
def test_a_violation_is_seen(case: str, tmp_path: Path) -> None:
    path, source, expected = VIOLATIONS[case]
    file = tmp_path / "vox_core" / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert [expected in fault for fault in faults("vox_core", tmp_path / "vox_core")] == [True]


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

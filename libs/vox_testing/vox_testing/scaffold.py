"""`vox plugin new`: write the package of a new backend, with passing tests.

Two kinds: `torch` drives the engine in vox_torch, for hardware that torch knows; `bare` has every
hook with its types, which refuses all work, and classes to begin a model with. The files are
templates beside this module (`string.Template`); a package is written atomically.

This module installs and downloads nothing. Unusable names are refused, never changed.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import string
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.version import Version

from vox_core.api.files import atomic_folder
from vox_core.api.host import known_plugins
from vox_core.contract import API_VERSION
from vox_core.errors import ConfigError
from vox_core.hookspecs import ENTRY_POINTS

Kind: TypeAlias = Literal["torch", "bare"]

TEMPLATES = Path(__file__).with_name("templates")

# Valid as a package, a distribution and a manifest's id.
_NAME = r"[a-z]([a-z0-9_]*[a-z0-9])?"
_NAME_IN_WORDS = "lower-case letters, digits and _, from a letter to a letter or digit"

_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "{name}/__init__.py": "{kind}.py",
    "{name}/model.py": "model.py",
    "{name}/vox_plugin.toml": "{kind}.toml",
    "{name}/probe.py": "probe.py",
    "tests/test_conformance.py": "test_conformance.py",
    ".github/workflows/ci.yml": "ci.yml",
}


@dataclass(frozen=True, slots=True)
class Project:
    """Names and licence of a package to write.

    Args:
        name: name of the distribution and of the package.
        id: name for `--backend`.
        licence: an SPDX expression.
    """

    name: str
    id: str
    kind: Kind = "torch"
    licence: str = "Apache-2.0"


def render(project: Project) -> dict[str, str]:
    """Return every file of the package: relative path -> text.

    Raises:
        ConfigError: C002; a name or the licence cannot be used, with every reason.
    """
    _require_usable(project)
    values = {
        "name": project.name,
        "id": project.id,
        "licence": project.licence,
        "api": API_VERSION,
        "dependencies": "\n".join(f'    "{each}",' for each in _dependencies(project.kind)),
        "testing": f"vox-ml-testing{_series()}",
    }
    names = {"name": project.name, "kind": project.kind}
    return {
        path.format(**names): _template(file.format(**names)).substitute(values)
        for path, file in _FILES.items()
        if file != "model.py" or project.kind == "bare"
    }


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write `files` to `folder`, atomically.

    Raises:
        OutputError: `folder` exists, or cannot be written.
    """
    with atomic_folder(folder) as temporary:
        for path, text in files.items():
            file = temporary / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")


def _template(name: str) -> string.Template:
    return string.Template((TEMPLATES / f"{name}.tmpl").read_text(encoding="utf-8"))


def _dependencies(kind: Kind) -> list[str]:
    ours = ["vox-ml"] if kind == "bare" else ["vox-ml", "vox-ml-torch"]
    return [f"{distribution}{_series()}" for distribution in ours]


def _series() -> str:
    """Return the minor series of the installed vox; all of its distributions share one version."""
    installed = Version(metadata.version("vox-ml"))
    return f">={installed.major}.{installed.minor},<{installed.major}.{installed.minor + 1}"


# --- what cannot be used --------------------------------------------------------------------------


def _require_usable(project: Project) -> None:
    faults = [
        *(f"name {project.name!r}: {fault}" for fault in _name_faults(project.name)),
        *(f"id {project.id!r}: {fault}" for fault in _id_faults(project)),
        *(f"licence {project.licence!r}: {fault}" for fault in _licence_faults(project.licence)),
    ]
    if faults:
        raise ConfigError(
            "C002",
            "no package can be made under these names",
            faults=faults,
            remedy="choose others: vox plugin new NAME [--id ID] [--licence SPDX]",
        )


def _name_faults(name: str) -> Iterator[str]:
    if not re.fullmatch(_NAME, name):
        yield f"expected {_NAME_IN_WORDS}"
    elif keyword.iskeyword(name):
        yield "a keyword of Python"
    elif name in sys.stdlib_module_names:
        yield "a module of Python's standard library"
    elif importlib.util.find_spec(name) or _is_installed(name):
        yield "installed in this environment already"
    elif owner := {each.import_package: each.id for each in known_plugins().values()}.get(name):
        yield f"the package of plugin {owner!r} in the catalog"


def _id_faults(project: Project) -> Iterator[str]:
    if not re.fullmatch(_NAME, project.id):
        if project.id != project.name:  # or it was reported for the name
            yield f"expected {_NAME_IN_WORDS}"
    elif project.id in known_plugins():
        yield "a plugin of the catalog"
    elif project.id in metadata.entry_points(group=ENTRY_POINTS).names:
        yield "a plugin that is installed in this environment"


def _licence_faults(licence: str) -> Iterator[str]:
    try:
        canonicalize_license_expression(licence)
    except InvalidLicenseExpression:
        yield "expected an SPDX expression, such as MIT or Apache-2.0"


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True

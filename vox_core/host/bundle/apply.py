"""A bundle file installed into an environment, with no network."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from vox_core.catalog import Catalog
from vox_core.catalog.entries import objections
from vox_core.errors import BackendError, PluginError
from vox_core.host.bundle.archive import ANY, Bundle
from vox_core.host.bundle.pip import QUIET, ask, pip
from vox_core.host.bundle.read import opened, unpack
from vox_core.host.bundle.verify import verified


def apply(file: Path, catalog: Catalog, python: str = sys.executable) -> Bundle:
    """Verify a bundle file and install its wheels, and nothing else, with no network.

    What is installed in the same version already stays as it is.

    Args:
        python: the interpreter of the environment to install into.

    Raises:
        BackendError: B008, the bundle is not sound; B009, it is not for that environment.
        PluginError: X004, pip failed; it puts back what it had taken out.
        StorageError: an I/O error.
    """
    with opened(file) as archive:
        bundle = verified(file, archive, catalog)
        _require_fit(bundle, catalog, python)
        with tempfile.TemporaryDirectory(prefix="vox-bundle-") as scratch:
            for wheel in bundle.wheels:
                unpack(archive, wheel, Path(scratch))
            _install(bundle, Path(scratch), python)
    return bundle


def _require_fit(bundle: Bundle, catalog: Catalog, python: str) -> None:
    from vox_core.host.probe import accelerators

    version, platform = ask(python)
    about, tags = bundle.about, {"cpu", *(each.tag for each in accelerators())}
    faults = []
    if about.python not in (ANY, version):
        faults.append(f"made for Python {about.python}, this is {version}")
    if about.platform not in (ANY, platform):
        faults.append(f"made for {about.platform}, this is {platform}")
    environment = {"python_version": version}
    for plugin in catalog.resolve(about.id):
        faults += objections(plugin, tags, environment)
    if faults:
        raise BackendError(
            "B009",
            "the bundle is not for this environment",
            where=python,
            faults=faults,
            remedy="make one for it: vox bundle build; or name another one: --target-python",
        )


def _install(bundle: Bundle, folder: Path, python: str) -> None:
    """pip sees the unpacked wheels and no other, and holds them against the lock once more."""
    pins = folder / "requirements.txt"
    pins.write_text(
        "".join(
            f"{each.name}=={each.version} --hash=sha256:{each.sha256}\n" for each in bundle.wheels
        )
    )
    only = ["--no-index", "--no-deps", "--require-hashes", "--find-links", str(folder)]
    said = pip(python, ["install", *QUIET, *only, "--requirement", str(pins)], _unconfigured())
    if said is not None:
        raise PluginError(
            "X004",
            "pip could not install the bundle",
            where=python,
            faults=said,
            remedy="mend what pip reports, or name another environment: --target-python",
        )


def _unconfigured() -> dict[str, str]:
    """An environment in which pip's own settings add no index and no folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull}

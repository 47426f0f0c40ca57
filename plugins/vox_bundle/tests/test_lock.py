"""`vox bundle lock` in a real environment that has no pip, without network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tomllib
from pathlib import Path

from tests.core.install_samples import World, plugin


def test_a_lock_of_what_is_installed(tmp_path: Path) -> None:
    world = World(tmp_path / "world", "vox_bundle")
    out = tmp_path / "pylock.toml"

    def locked() -> list[str]:
        command = [world.python, "-m", "vox_core.cli", "bundle", "lock", "--out", out, "--json"]
        done = subprocess.run(command, env=world.environ(), capture_output=True, check=True)
        unhashed: list[str] = json.loads(done.stdout)["without_hash"]
        return unhashed

    library = {"name": "vox-t-lib", "version": "1.0", "files": {"vox_t_lib/__init__.py": ""}}
    world.wheel(library)
    file = world.wheel(plugin("good", "1.0", ["vox-t-lib"]))
    world.done("install", "--from-pypi", "vox-t-good==1.0", "--yes")
    assert "vox-t-good" not in locked()
    document = tomllib.loads(out.read_text())
    packages = {package["name"]: package for package in document["packages"]}
    assert document["lock-version"] == "1.0"
    assert packages.keys() >= {"vox-t-good", "vox-t-lib"}
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert packages["vox-t-good"]["wheels"][0]["hashes"] == {"sha256": digest}
    file.unlink()
    assert "vox-t-good" in locked()
    assert {"name": "vox-t-good", "version": "1.0"} in tomllib.loads(out.read_text())["packages"]

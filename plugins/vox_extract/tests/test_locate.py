"""What a word on the command line names, what is left out of it, and its licence."""

from __future__ import annotations

from email.message import Message
from pathlib import Path

import pytest
from plugins.vox_extract.tests.samples import made

from vox_core.errors import DataError
from vox_extract import provenance
from vox_extract.locate import locate

MIT = "Permission is hereby granted, free of charge, to any person … without\nrestriction …"
BSD = "Redistribution and use in source and binary forms, with or without modification, …"


def modules(name: str | Path) -> list[str]:
    return [file.module for file in locate(str(name)).files]


def test_the_standard_library_and_its_modules() -> None:
    assert modules("json") == ["json", "json.decoder", "json.encoder", "json.scanner", "json.tool"]
    assert modules("heapq") == ["heapq"]
    whole = modules("stdlib")
    assert {"json.decoder", "heapq", "_collections_abc"} <= set(whole)
    assert not [name for name in whole if name.split(".")[0] in ("test", "idlelib")]
    assert not [name for name in whole if ".test" in name]


def test_what_is_installed() -> None:
    """An import package has its distribution's name; a distribution has all of its packages."""
    by_import = locate("yaml")
    assert (by_import.package, by_import.licence) == ("PyYAML", "MIT")
    whole = locate("PyYAML")
    assert set(by_import.files) < set(whole.files)
    assert {file.relative.partition("/")[0] for file in whole.files} == {"yaml", "_yaml"}
    assert {"_pytest", "pytest"} <= set(modules("pytest"))
    assert by_import.version[0].isdigit()


@pytest.mark.parametrize("name", ["nothing-of-that-name", "./nothing", "nothing.py", "sys", "a/b"])
def test_what_is_not_there(name: str) -> None:
    with pytest.raises(DataError, match="VOX-D060") as error:
        locate(name)
    assert error.value.exit_code == 2


def test_a_folder_of_a_project(tmp_path: Path) -> None:
    """Module names begin at the topmost package; tests, builds and environments are left out."""
    made(
        tmp_path / "src",
        {"a.py": "", "inner/__init__.py": "", "inner/b.py": "", "inner/b.pyi": "", "test_a.py": ""},
    )
    for name in ("tests/c.py", "build/d.py", ".venv/e.py", "env/pyvenv.cfg", "env/f.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tool.py").touch()
    (tmp_path / "loop").symlink_to(tmp_path)
    assert modules(tmp_path) == ["pack", "pack.a", "pack.inner", "pack.inner.b", "tool"]
    assert modules(tmp_path / "src" / "pack")[0] == "pack"
    assert modules(tmp_path / "tool.py") == ["tool"]
    assert locate(str(tmp_path / "src" / "pack")).files[0].relative == "pack/__init__.py"


def test_a_project_says_what_it_is(tmp_path: Path) -> None:
    package = made(tmp_path, {})
    unknown = locate(str(package))
    assert (unknown.package, unknown.version, unknown.licence) == ("pack", "unknown", "unknown")
    (tmp_path / "LICENSE.md").write_text(MIT)
    assert locate(str(package)).licence == "MIT"
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "dist"\nversion = "1.2"\nlicense = "ISC"\n'
    )
    told = locate(str(package))
    assert (told.package, told.version, told.licence) == ("dist", "1.2", "ISC")
    (tmp_path / "pyproject.toml").write_text("[project")
    assert locate(str(package)).licence == "MIT"


def test_a_licence_beyond_the_root_of_a_repository_is_not_its_own(tmp_path: Path) -> None:
    package = made(tmp_path / "repository", {})
    (tmp_path / "LICENSE").write_text(MIT)
    assert locate(str(package)).licence == "MIT"
    (tmp_path / "repository" / ".git").mkdir()
    assert locate(str(package)).licence == "unknown"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"License-Expression": "MIT OR ISC", "License": "x"}, "MIT OR ISC"),
        ({"License": "BSD-3-Clause"}, "BSD-3-Clause"),
        ({"License": f"Copyright me\n{MIT}"}, "MIT"),
        ({"License": f"{BSD}\n… GNU General Public License, version 3 …"}, "BSD-2-Clause"),
        ({"License": "UNKNOWN", "Classifier": "License :: OSI Approved :: ISC"}, "ISC"),
        ({"Classifier": "License :: OSI Approved"}, None),
        ({"License": "all of it\nmine"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_licence_that_metadata_declare(fields: dict[str, str], expected: str | None) -> None:
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    assert provenance.of_metadata(metadata) == expected


def test_the_licence_of_this_repository_is_known() -> None:
    assert provenance.nearby(Path(__file__).parents[2]) == "Apache-2.0"

"""`vox_plugin.toml`: what is read, and that every fault is told at once."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from vox_core.errors import BackendError
from vox_core.host.manifest import parse_manifest
from vox_core.host.probe import Machine, unmet

BACKEND = """
id = "cpu"
name = "CPU"
version = "0.1.0"
api = "2.0"
licence = "Apache-2.0"

[capabilities]
devices = ["cpu"]
quantisations = ["none"]
dtypes = ["fp32"]
methods = ["lora"]
families = "*"

[probe]
file = "probe.py"
"""
OBSERVER = BACKEND.partition("[capabilities]")[0] + 'provides.hooks = ["vox_event"]\n'
VERSIONS = {"torch": "2.13.0+cpu", "Torch": "2.13.0+cpu", "mlx": "0.33.0.dev1"}
LINUX = Machine("linux", "x86_64", "3.11.7", VERSIONS.get)


def faults_of(text: str) -> BackendError:
    with pytest.raises(BackendError) as caught:
        parse_manifest(text, "somewhere/vox_plugin.toml")
    assert caught.value.code == "VOX-B006"
    assert caught.value.where == "somewhere/vox_plugin.toml"
    return caught.value


def test_a_backend_is_read() -> None:
    manifest = parse_manifest(BACKEND, "here")
    assert (manifest.id, manifest.priority, manifest.homepage) == ("cpu", 0, None)
    assert manifest.capabilities.families == ("*",)
    assert manifest.requires.distributions == ()
    assert manifest.probe is not None and manifest.probe.file == "probe.py"


def test_families_may_be_listed() -> None:
    text = BACKEND.replace('families = "*"', 'families = ["llama", "qwen3"]')
    assert parse_manifest(text, "here").capabilities.families == ("llama", "qwen3")


def test_optimizers_may_be_left_out() -> None:
    assert parse_manifest(BACKEND, "here").capabilities.optimizers == ("adamw",)
    both = 'families = "*"\noptimizers = ["adamw", "adamw-8bit"]'
    said = parse_manifest(BACKEND.replace('families = "*"', both), "here").capabilities
    assert said.optimizers == ("adamw", "adamw-8bit")


def test_what_is_said_of_memory_and_what_is_assumed() -> None:
    silent = parse_manifest(BACKEND, "here").memory
    assert (silent.runtime_bytes, silent.activations, silent.logits_elements) == (10**9, 1.5, 0)
    assert silent.working == 1.5
    assert silent.padded_rows and silent.dequantises
    said = parse_manifest(f"{BACKEND}[memory]\nruntime-bytes = 5\npadded-rows = false\n", "here")
    assert (said.memory.runtime_bytes, said.memory.padded_rows) == (5, False)
    wrong = f"{BACKEND}[memory]\nruntime-byte = 5\nactivations = 0\nlogits-elements = -1\n"
    told = "\n".join(faults_of(wrong).faults)
    assert "runtime-byte: unknown key (did you mean runtime-bytes?)" in told
    assert "memory.activations" in told and "memory.logits-elements" in told


def test_automatic_unless_it_says_otherwise() -> None:
    assert parse_manifest(BACKEND, "here").automatic
    by_name = BACKEND.replace("[capabilities]", "automatic = false\n[capabilities]")
    assert not parse_manifest(by_name, "here").automatic


def test_an_observer_needs_neither_capabilities_nor_a_probe() -> None:
    assert parse_manifest(OBSERVER, "here").probe is None


def test_a_backend_needs_a_probe() -> None:
    assert faults_of(BACKEND.partition("[probe]")[0]).faults == (
        "[probe]: missing (a plugin with [capabilities] is a backend, and has a probe)",
    )


def test_a_plugin_offers_something() -> None:
    assert faults_of(OBSERVER.partition("provides")[0]).faults == (
        "[capabilities], [[commands]] or [provides]: missing; the plugin offers nothing",
    )


def test_what_is_provided() -> None:
    text = (
        OBSERVER.partition("provides")[0]
        + """
[[commands]]
name = "data stats"
help = "Rows."
entry = "x.cli:stats"
[provides]
hooks = ["vox_event"]
row-sources = { suffixes = [".parquet"], schemes = ["hf"] }
"""
    )
    assert parse_manifest(text, "here").provided == {
        "commands": ("data stats",),
        "hooks": ("vox_event",),
        "row-sources": (".parquet", "hf:"),
    }
    assert (
        faults_of(text.replace(".parquet", "parquet"))
        .faults[0]
        .startswith("provides.row-sources: a suffix has a dot and lower case: .parquet (found: ")
    )
    assert (
        faults_of(text.replace('"hf"', '"qa:"'))
        .faults[0]
        .startswith("provides.row-sources: a scheme is named without its colon: qa (found: ")
    )
    wrong = (
        text.replace('"x.cli:stats"', '"x.cli"')
        .replace("data stats", "Data")
        .replace("suffixes", "files")
    )
    told = faults_of(wrong).faults
    assert [fault.partition(":")[0] for fault in told] == [
        "commands.0.name",
        "commands.0.entry",
        "provides.row-sources",
    ]


ONE_FAULT = {
    "missing": ('name = "CPU"', "", "name: missing"),
    "wrong type": ('name = "CPU"', "name = 5", "name: input should be a valid string (found: 5)"),
    "unknown key": ("licence", "license", "license: unknown key (did you mean licence?)"),
    "unknown key in a table": (
        "dtypes",
        "d-types",
        "capabilities.d-types: unknown key (did you mean dtypes?)",
    ),
    "unknown table": ("[probe]", "[probes]", "probes: unknown key (did you mean probe?)"),
    "version": ("0.1.0", "new", "version: invalid version: 'new' (found: 'new')"),
    "no dtype": ('["fp32"]', "[]", "capabilities.dtypes: name at least one (found: [])"),
    "quantisation": (
        '["none"]',
        '["nf5"]',
        "capabilities.quantisations.0: input should be 'none', 'nf4', 'nf4-embeddings', "
        "'nf4-single', 'int8', 'affine4', 'affine8', 'mxfp4' or 'nvfp4' (found: 'nf5')",
    ),
    "text for a switch": (
        'families = "*"',
        'families = "*"\nstreamed-load = "yes"',
        "capabilities.streamed-load: input should be a valid boolean (found: 'yes')",
    ),
    "probe outside": (
        "probe.py",
        "../probe.py",
        "probe.file: give a .py file inside the package (found: '../probe.py')",
    ),
    "probe is a binary": (
        "probe.py",
        "probe",
        "probe.file: give a .py file inside the package (found: 'probe')",
    ),
    "requirement": (
        "[probe]",
        '[requires]\ndistributions = ["torch[x]"]\n[probe]',
        "requires.distributions.0: give a distribution and a version range, nothing else "
        "(found: 'torch[x]')",
    ),
}


@pytest.mark.parametrize("case", ONE_FAULT)
def test_a_fault_is_told_in_the_words_of_the_file(case: str) -> None:
    right, wrong, expected = ONE_FAULT[case]
    assert right in BACKEND
    assert expected in faults_of(BACKEND.replace(right, wrong)).faults


def test_all_faults_are_told_together() -> None:
    text = BACKEND
    for case in ("wrong type", "version", "no dtype", "quantisation", "probe outside"):
        text = text.replace(*ONE_FAULT[case][:2])
    assert len(faults_of(text).faults) == 5


def test_text_that_is_not_toml_is_a_fault() -> None:
    (fault,) = faults_of("id = ").faults
    assert fault.startswith("not TOML: ")


def test_what_a_newer_vox_would_understand_asks_for_the_newer_vox() -> None:
    newer = BACKEND.replace('"2.0"', '"2.7"').replace("[probe]", "[quantum]\nx = 1\n[probe]")
    fault = faults_of(newer)
    assert fault.what == "a plugin's manifest is written for API 2.7, this vox speaks 2.0"
    assert fault.remedy == "upgrade vox-ml"


REQUIREMENTS: dict[str, tuple[str, tuple[str, str] | None]] = {
    "nothing": ("", None),
    "all met": ('os = ["linux"]\narch = ["x86_64"]\npython = ">=3.11"', None),
    "local version": ('distributions = ["torch>=2.6,<3"]', None),
    "nightly build": ('distributions = ["mlx>=0.30"]', None),
    "system": ('os = ["macos"]', ("platform", "linux (needs: macos)")),
    "processor": ('arch = ["arm64"]', ("platform", "x86_64 (needs: arm64)")),
    "python": ('python = ">=3.12"', ("python", "3.11.7 (needs: >=3.12)")),
    "absent": (
        'distributions = ["bitsandbytes>=0.50"]',
        ("distribution", "bitsandbytes>=0.50 is not installed"),
    ),
    "too old": (
        'distributions = ["Torch>=3"]',
        ("distribution", "Torch is 2.13.0+cpu (needs: >=3)"),
    ),
}


@pytest.mark.parametrize("case", REQUIREMENTS)
def test_requirements_are_held_against_the_machine(case: str) -> None:
    text, expected = REQUIREMENTS[case]
    assert unmet(parse_manifest(f"{BACKEND}[requires]\n{text}", "here"), LINUX) == expected


APIS = {
    "2.0": None,
    "1.0": "vox plugin upgrade cpu",
    "2.1": "upgrade vox-ml",
    "3.0": "upgrade vox-ml",
}


@pytest.mark.parametrize("api", APIS)
def test_the_api_version_decides_who_has_to_move(api: str) -> None:
    found = unmet(parse_manifest(BACKEND.replace('"2.0"', f'"{api}"'), "here"), LINUX)
    if APIS[api] is None:
        assert found is None
    else:
        assert found == ("api", f"written for {api}, this vox speaks 2.0; {APIS[api]}")


def test_the_example_in_the_docstring_is_valid() -> None:
    import vox_core.host.manifest as module

    lines = str(module.__doc__).splitlines()
    example = "\n".join(line[4:] for line in lines if line.startswith("    "))
    document: dict[str, Any] = tomllib.loads(example)
    assert parse_manifest(example, "docstring").id == document["id"] == "cpu"

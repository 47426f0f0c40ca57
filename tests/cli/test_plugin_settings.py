"""Sections of vox.toml that belong to plugins: flags, variables, checks, schema, faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import vox_core
from tests.cli.test_plugin_commands import PLUGIN, site, vox
from tests.core.plugin_site import Site
from vox_core.errors import ConfigError

__all__ = ["site"]

MANIFEST = (
    PLUGIN
    + """
[[commands]]
name = "{id}"
help = "Measure."
entry = "vox_x_{id}.cli:measure"

[provides]
settings = ["gauge"]
"""
)
PACKAGE = """
import sys
from vox_core.hookspecs import hookimpl

backend = sys.modules[__name__]

@hookimpl
def vox_settings(section):
    from {package}.settings import GaugeSettings
    return GaugeSettings
"""
SETTINGS = """
from pathlib import Path
from typing import ClassVar
from pydantic import Field
from vox_core.api.settings import PositiveInt, Section

class GaugeSettings(Section):
    section: ClassVar[str] = "gauge"
    depth: PositiveInt = Field(3, description="How deep.")
    log_file: Path | None = Field(None, description="Where to.")
"""
CLI = """
import click
from vox_core.api.commands import Command, options_of, settings_from
from {package}.settings import GaugeSettings

@click.command("measure", cls=Command, params=options_of(GaugeSettings))
def measure(**flags):
    settings = settings_from(GaugeSettings, flags)
    click.echo(f"{{settings.depth}} {{settings.log_file}}")
"""


def install(site: Site, id: str = "gauge", settings: str = SETTINGS) -> None:
    package = site.add(id, PACKAGE.format(package=f"vox_x_{id}"), manifest=MANIFEST)
    (site.folder / package / "settings.py").write_text(settings)
    (site.folder / package / "cli.py").write_text(CLI.format(package=package))


def write(text: str) -> None:
    Path("vox.toml").write_text(text)


def test_a_flag_wins_over_a_variable_over_the_file(site: Site, monkeypatch) -> None:
    install(site)
    assert vox("gauge") == (0, "3 None\n", "")
    Path("in").mkdir()
    Path("in/vox.toml").write_text('[gauge]\ndepth = 4\nlog-file = "a"\n')
    given = ("gauge", "--config", "in/vox.toml")
    assert vox(*given) == (0, "4 in/a\n", "")
    monkeypatch.setenv("VOX_GAUGE_DEPTH", "5")
    assert vox(*given) == (0, "5 in/a\n", "")
    assert vox(*given, "--depth", "6", "--log-file", "b") == (0, "6 b\n", "")
    assert "--depth INTEGER" in vox("gauge", "--help")[1]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("[gauge]\ndept = 4\n", "[gauge] dept is unknown; did you mean depth?"),
        ("depth = 4\n", "depth stands outside all sections; put depth under [gauge]"),
        ("[guage]\ndepth = 4\n", "[guage] is unknown; did you mean gauge?"),
        ("[train]\nranc = 4\n", "[train] ranc is unknown; did you mean rank?"),
        ("[gauge]\ndepth = 0\n", "depth = 0: input should be greater than 0 (from vox.toml)"),
    ],
)
def test_its_command_names_faults_with_the_nearest_name(site: Site, written, said) -> None:
    install(site)
    write(written)
    code, _, err = vox("gauge")
    assert (code, said in err) == (2, True)


def test_an_unknown_variable_is_a_fault(site: Site, monkeypatch) -> None:
    install(site)
    monkeypatch.setenv("VOX_GAUGE_DEPHT", "4")
    assert "VOX_GAUGE_DEPHT is unknown; did you mean VOX_GAUGE_DEPTH?" in vox("gauge")[2]


def test_config_shows_and_checks_it(site: Site) -> None:
    install(site)
    write("[gauge]\ndepth = 4\n")
    _, out, err = vox("config", "show")
    shown = [line.split() for line in out.partition("[gauge]\n")[2].splitlines()]
    assert (shown[:2], err) == (
        [["depth", "=", "4", "#", "vox.toml"], ["#", "log-file", "=", "#", "default"]],
        "",
    )
    schema = json.loads(vox("config", "schema")[1])
    assert schema["properties"]["gauge"] == {"$ref": "#/$defs/GaugeSettings"}
    assert [*schema["$defs"]["GaugeSettings"]["properties"]] == ["depth", "log-file"]
    write("[gauge]\ndept = 4\n")
    code, _, err = vox("config", "show")
    assert (code, "[gauge] dept is unknown" in err) == (2, True)


def test_other_commands_neither_check_nor_import_it(site: Site) -> None:
    install(site, settings="raise RuntimeError('imported')")
    write("[gauge]\ndept = 4\n")
    code, _, err = vox("train", "--data", "absent.jsonl")
    assert (code, "VOX-D001" in err, "gauge" in err) == (2, True, False)


def test_a_section_of_no_plugin_is_a_fault_of_every_command(site: Site) -> None:
    install(site)
    write("[guage]\n")
    assert "[guage] is unknown; did you mean gauge?" in vox("train")[2]
    with pytest.raises(ConfigError) as fault:
        vox_core.train(data="absent.jsonl")
    assert (fault.value.code, fault.value.faults) == (
        "VOX-C001",
        ("[guage] is unknown; did you mean gauge?",),
    )


def test_a_section_may_be_that_of_a_plugin_without_a_readable_manifest(site: Site) -> None:
    install(site)
    (site.folder / "vox_x_gauge" / "vox_plugin.toml").write_text("id = ")
    write("[gauge]\ndepth = 4\n")
    code, _, err = vox("train", "--data", "absent.jsonl")
    assert (code, "VOX-D001" in err) == (2, True)
    write("[train]\nranc = 4\n")
    assert "[train] ranc is unknown" in vox("train")[2]


def test_a_section_of_a_plugin_that_is_not_here_is_not_checked(site: Site, monkeypatch) -> None:
    write("[oracle]\nanything = 1\n")
    assert "[oracle] is unknown" in vox("train")[2]
    catalog = site.folder / "catalog.toml"
    catalog.write_text(
        '[[plugin]]\nid = "oracle"\ndescription = "o"\nprovides = { settings = ["oracle"] }\n'
        'default-source = "local:p"\ndistribution = "vox-ml-oracle"\n'
        'import-package = "vox_oracle"\nlicence = "MIT"\n'
    )
    monkeypatch.setenv("VOX_CATALOG", str(catalog))
    code, _, err = vox("train", "--data", "absent.jsonl")
    assert (code, "VOX-D001" in err) == (2, True)
    code, out, err = vox("config", "show")
    assert (code, "oracle" in out, err) == (0, False, "")


LIKE = "expected a Section with section = 'gauge'"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("raise RuntimeError('sick')", "RuntimeError: sick"),
        ("GaugeSettings = str", f"the class str; {LIKE}"),
        (SETTINGS.replace('"gauge"', '"other"'), f"the class GaugeSettings; {LIKE}"),
        (SETTINGS.replace("Field(3, ", "Field("), "depth without a default"),
    ],
)
def test_a_broken_section_is_left_out_and_named_by_the_doctor(site: Site, settings, said) -> None:
    install(site, settings=settings)
    write("[train]\nrank = 4\n")
    code, out, err = vox("config", "show")
    assert (code, "[gauge]" in out) == (0, False)
    assert "rank = 4 " in out
    assert "warning: [gauge] is left out: plugin 'gauge'" in err and said.partition(";")[0] in err
    assert json.loads(vox("config", "schema")[1])["properties"].keys() >= {"train"}
    code, out, _ = vox("plugin", "doctor", "gauge")
    assert (code, f"[gauge] of vox.toml: {said}" in out) == (1, True)


def test_a_section_of_vox_itself_is_refused_by_the_doctor(site: Site) -> None:
    install(site)
    manifest = site.folder / "vox_x_gauge" / "vox_plugin.toml"
    manifest.write_text(
        manifest.read_text().replace('settings = ["gauge"]', 'settings = ["train"]')
    )
    code, out, _ = vox("plugin", "doctor", "gauge")
    assert (code, "the section [train] of vox.toml is vox's own" in out) == (1, True)


@pytest.mark.parametrize("name", ["my-gauge", "train_extra", "Gauge"])
def test_variables_can_begin_with_a_sections_name(site: Site, name: str) -> None:
    install(site, settings=SETTINGS.replace('"gauge"', f'"{name}"'))
    manifest = site.folder / "vox_x_gauge" / "vox_plugin.toml"
    manifest.write_text(
        manifest.read_text().replace('settings = ["gauge"]', f"settings = ['{name}']")
    )
    assert (
        f"[{name}] is left out: plugin 'gauge' is installed but broken" in vox("config", "show")[2]
    )
    code, out, _ = vox("plugin", "doctor", "gauge")
    assert (code, f"[{name}] of vox.toml: the name '{name}'" in out) == (1, True)


def test_of_two_plugins_the_user_decides(site: Site) -> None:
    install(site, "gauge")
    install(site, "meter", SETTINGS.replace("depth", "height"))
    _, out, err = vox("config", "show")
    assert "[gauge]" not in out
    assert "two plugins provide 'gauge' (settings): gauge and meter" in err
    assert '[plugin.provider] "settings.gauge" = "gauge"' in err
    write('[plugin.provider]\n"settings.gauge" = "meter"\n')
    _, out, err = vox("config", "show")
    assert ("height = 3" in out, err) == (True, "")


def test_a_disabled_plugins_section_is_not_shown(site: Site, monkeypatch) -> None:
    install(site)
    write("[gauge]\ndept = 4\n")
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "gauge")
    code, out, err = vox("config", "show")
    assert (code, "gauge" in out, err) == (0, False, "")


def test_a_section_of_the_core_stays_the_cores(site: Site) -> None:
    site.add("greedy", PACKAGE, manifest=MANIFEST.replace('["gauge"]', '["train"]'))
    _, out, err = vox("config", "show")
    assert (out.count("[train]\n"), "micro-batch-tokens" in out, err) == (1, True, "")

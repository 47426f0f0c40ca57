"""Plugins as packages on disk: found without being imported, loaded one at a time, isolated.

Each test writes real distributions (package, `*.dist-info`, `entry_points.txt`) into a folder of
its own and puts it on the path.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.core.plugin_site import MANIFEST, WORKS, Site
from vox_core.contract import AdapterState, Batch, LoadJob, MergeJob, RunContext, TrainJob, Update
from vox_core.errors import BackendError, ConfigError, DataError, PluginError
from vox_core.host import Request, Seen, Verdict, choose
from vox_core.host.discover import discover
from vox_core.host.load import Backend, load_backend

NOT_IMPORTABLE = "raise SystemExit('imported')"

ADAPTER = AdapterState("lora", {})
CONTEXT = cast(RunContext, object())
TRAIN = TrainJob(plan=cast(Any, None), model=Path())
MERGE = MergeJob(ADAPTER, (), cast(Any, None))
LOAD = LoadJob(Path(), "fp32")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Site(folder)
    for name in [name for name in sys.modules if name.startswith("vox_x_")]:
        del sys.modules[name]


# --- discovery ------------------------------------------------------------------------------------


def test_plugins_are_found_without_being_imported(site: Site) -> None:
    packages = [site.add(id, NOT_IMPORTABLE) for id in ("second", "first")]
    site.describe("unrelated", "[console_scripts]\nx = y:z\n")
    plugins = discover([str(site.folder)])
    assert [(each.id, each.distribution, each.version) for each in plugins] == [
        ("first", "vox-x-first", "0.1.0"),
        ("second", "vox-x-second", "0.1.0"),
    ]
    assert plugins[0].manifest is not None and plugins[0].manifest.id == "first"
    assert plugins[0].folder == site.folder / "vox_x_first"
    assert not sys.modules.keys() & set(packages)


def test_the_import_path_is_searched_by_default(site: Site) -> None:
    site.add("mine", NOT_IMPORTABLE)
    assert [each.fault for each in discover() if each.id == "mine"] == [None]


def test_an_editable_install_by_path_is_found(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("mine", NOT_IMPORTABLE, into=tmp_path / "checkout")
    monkeypatch.syspath_prepend(str(tmp_path / "checkout"))
    (plugin,) = [each for each in discover() if each.id == "mine"]
    assert plugin.folder == tmp_path / "checkout/vox_x_mine"


def test_an_editable_install_by_finder_is_found(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.add("mine", NOT_IMPORTABLE, into=tmp_path / "checkout")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            here = [str(tmp_path / "checkout")]
            return PathFinder.find_spec(name, here) if name == "vox_x_mine" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    (plugin,) = [each for each in discover() if each.id == "mine"]
    assert plugin.folder == tmp_path / "checkout/vox_x_mine"


def test_a_plugin_in_a_namespace_package_is_found_by_its_files(site: Site) -> None:
    site.add("mine", NOT_IMPORTABLE, package="vox_x_company.mine")
    assert site.found("mine").folder == site.folder / "vox_x_company/mine"


def test_the_first_distribution_on_the_path_hides_others_of_its_name(
    site: Site, tmp_path: Path
) -> None:
    site.add("mine")
    older = Site(tmp_path / "older")
    older.add("mine")
    (plugin,) = discover([str(site.folder), str(older.folder)])
    assert plugin.folder == site.folder / "vox_x_mine"


def test_two_plugins_with_one_id_are_both_at_fault(site: Site) -> None:
    site.add("same")
    site.add("same", distribution="vox-y-same", package="vox_x_other")
    site.add("good")
    good, *both = discover([str(site.folder)])
    assert good.fault is None
    for plugin in both:
        assert plugin.fault is not None and plugin.fault.what.endswith("defined more than once")
        assert plugin.fault.found == "distributions vox-x-same and vox-y-same"
        assert plugin.fault.remedy == (
            "remove all but one: vox plugin remove vox-x-same or vox plugin remove vox-y-same"
        )


def no_manifest(site: Site) -> None:
    site.add("bad", manifest=None)


def invalid_manifest(site: Site) -> None:
    site.add("bad", manifest="id = 5")


def undecodable_manifest(site: Site) -> None:
    package = site.add("bad")
    (site.folder / package / "vox_plugin.toml").write_bytes(b'id = "\xff"')


def other_id(site: Site) -> None:
    site.add("bad", manifest=MANIFEST.replace("{id}", "worse"))


def no_package(site: Site) -> None:
    site.describe("vox-x-bad", "[vox_core.plugins]\nbad = vox_x_gone:backend\n")


def a_module(site: Site) -> None:
    site.describe("vox-x-bad", "[vox_core.plugins]\nbad = vox_x_single:backend\n")
    (site.folder / "vox_x_single.py").write_text(WORKS)


def invalid_reference(site: Site) -> None:
    site.describe("vox-x-bad", "[vox_core.plugins]\nbad = ???\n")


def no_id(site: Site) -> None:
    site.describe("vox-x-bad", "[vox_core.plugins]\n= vox_x_gone:backend\n")


def steering_id(site: Site) -> None:
    site.describe("vox-x-bad", "[vox_core.plugins]\na\x1b[2Jd = vox_x_gone:backend\n")


def unparsable_entry_points(site: Site) -> None:
    site.describe("bad", "[vox_core.plugins]\nbad\n")


FAULTS: dict[Callable[[Site], None], str] = {
    no_manifest: "plugin 'bad' has no manifest",
    invalid_manifest: "id: input should be a valid string (found: 5)",
    undecodable_manifest: "UnicodeDecodeError",
    other_id: "id 'worse'",
    no_package: "no package 'vox_x_gone'",
    a_module: "no vox_plugin.toml in package 'vox_x_single'",
    invalid_reference: "entry point '???'",
    unparsable_entry_points: "cannot be read",
}


@pytest.mark.parametrize("damage", FAULTS)
def test_a_broken_plugin_is_its_own_fault_only(damage: Callable[[Site], None], site: Site) -> None:
    damage(site)
    site.add("good")
    bad, good = discover([str(site.folder)])
    assert (good.id, good.fault) == ("good", None)
    assert (bad.id, bad.manifest) == ("bad", None)
    assert bad.fault is not None and bad.fault.code == "VOX-B006"
    assert FAULTS[damage] in str(bad.fault)


@pytest.mark.parametrize(("damage", "name"), [(no_id, ""), (steering_id, "a\x1b[2Jd")])
def test_a_name_that_no_plugin_can_have(
    damage: Callable[[Site], None], name: str, site: Site
) -> None:
    damage(site)
    (bad,) = discover([str(site.folder)])
    assert (bad.id, bad.manifest) == (name, None)
    assert bad.fault is not None and bad.fault.found == repr(name)
    assert bad.fault.what == "an entry point has a name that no plugin can have"


@pytest.mark.parametrize("metadata", [None, b"", b"Name: \xff\n"])
def test_an_installation_with_damaged_metadata_is_still_told_of(
    metadata: bytes | None, site: Site
) -> None:
    site.add("mine")
    file = site.folder / "vox_x_mine-0.1.0.dist-info/METADATA"
    file.unlink() if metadata is None else file.write_bytes(metadata)
    assert site.found("mine").version == "unknown"


# --- loading --------------------------------------------------------------------------------------


def hooked(method: str) -> str:
    return f"{WORKS}\nclass Wrong:\n    @hookimpl\n    {method}\n        ...\nbackend = Wrong()\n"


UNLOADABLE = {
    "ImportError": ("import vox_x_nothing", "No module named 'vox_x_nothing'"),
    "SystemExit": ("raise SystemExit(3)", "SystemExit: 3"),
    "any exception": ("1 / 0", "ZeroDivisionError: division by zero"),
    "no object": ("", "AttributeError"),
    "a class": (WORKS.replace("Backend()", "Backend"), "Backend is a class"),
    "looking at it raises": (
        "class Lazy:\n    def __dir__(self): import vox_x_no\nbackend = Lazy()",
        "No module named 'vox_x_no'",
    ),
    "a misspelt hook": (hooked("def vox_trian(self, job, context):"), "unknown hook 'vox_trian'"),
    "other arguments": (hooked("def vox_train(self, job, world):"), "hook 'vox_train'"),
}


@pytest.mark.parametrize("case", UNLOADABLE)
def test_what_cannot_be_loaded_is_broken_and_says_why(case: str, site: Site) -> None:
    body, reason = UNLOADABLE[case]
    name = case.replace(" ", "_").lower()
    site.add(name, body)
    with pytest.raises(BackendError) as caught:
        load_backend(site.found(name), "train")
    assert caught.value.code == "VOX-B004"
    assert f"backend {name!r}" in caught.value.what
    assert reason in str(caught.value.found)
    assert caught.value.__cause__ is not None


def test_a_backend_without_the_hook_that_is_needed_is_broken(site: Site) -> None:
    site.add("mergeless", WORKS.replace("@hookimpl\n    def vox_merge", "def vox_merge"))
    backend = load_backend(site.found("mergeless"), "train")
    with pytest.raises(BackendError) as caught:
        backend.merge(MERGE, CONTEXT)
    assert (caught.value.code, caught.value.found) == ("VOX-B004", "no vox_merge")
    with pytest.raises(BackendError):
        load_backend(site.found("mergeless"), "merge")


def test_what_a_plugin_prints_when_imported_is_kept_off_stdout(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    site.add("chatty", f"print('hello')\n{WORKS}")
    load_backend(site.found("chatty"), "train")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "hello\n")


def test_the_hooks_are_called_as_typed_functions(site: Site) -> None:
    site.add("whole")
    backend = load_backend(site.found("whole"), "train")
    assert (backend.id, backend.found.shown_version) == ("whole", "0.1.0")
    trainer = backend.train(TRAIN, CONTEXT)
    assert trainer.state("adapter").step == 7
    assert trainer.update(cast(Any, None), "adapter") == 0.5
    assert list(backend.merge(MERGE, CONTEXT).tensors) == [("w", 1)]
    model = backend.load(LOAD, CONTEXT)
    assert model.logits(cast(Any, "T")) == "T"
    model.close()


def backend_that(site: Site, name: str, old: str, new: str) -> Backend:
    assert old in WORKS
    site.add(name, "from vox_core.errors import DataError\n" + WORKS.replace(old, new))
    return load_backend(site.found(name), "train")


MADE = "Learning()"


@pytest.mark.parametrize(
    ("name", "result", "found"), [("nothing", "None", "None"), ("number", "7", "type int")]
)
def test_a_wrong_result_is_the_plugins_failure(
    name: str, result: str, found: str, site: Site
) -> None:
    backend = backend_that(site, name, MADE, result)
    with pytest.raises(PluginError) as caught:
        backend.train(TRAIN, CONTEXT)
    assert caught.value.code == "VOX-X001"
    assert found in str(caught.value.found)
    assert caught.value.expected == "Trainer"


WRONG_RESULTS = {
    "too short": ("accumulate", "return np.zeros(4, 'f')", "float32 (4,)", "float32 (5,)"),
    "a list": ("accumulate", "return [0.0] * 5", "an object of type list", "float32 (5,)"),
    "float64": ("log_probs", "return np.zeros(5)", "float64 (5,)", "float32 (5,)"),
    "no norm": ("update", "pass", "None", "float"),
    "numpy's float": ("update", "return np.float32(1)", "float32 ()", "float"),
    "no state": ("state", "return {}", "an object of type dict", "TrainState"),
}


@pytest.mark.parametrize("name", WRONG_RESULTS)
def test_a_wrong_result_of_a_trainer_is_the_plugins_failure(name: str, site: Site) -> None:
    method, body, found, expected = WRONG_RESULTS[name]
    heading = f"    def {method}(self, "
    head, _, rest = WORKS.partition(heading)
    first, *_, after = [*rest.split("\n", 2)]
    code = f"{head}{heading}{first}\n        {body}\n{after}"
    site.add("wrong", f"import numpy as np\n{code}")
    trainer = load_backend(site.found("wrong"), "train").train(TRAIN, CONTEXT)
    zeros_T = np.zeros(5, np.int64)
    batch = Batch(zeros_T, zeros_T, np.ones(5, np.float32), zeros_T[:1])
    calls = {
        "accumulate": lambda: trainer.accumulate(batch, 0, "a"),
        "log_probs": lambda: trainer.log_probs(batch),
        "update": lambda: trainer.update(Update(1, 1.0, 1.0), "a"),
        "state": lambda: trainer.state("a"),
    }
    with pytest.raises(PluginError, match=f"wrong result from {method}") as caught:
        calls[method]()
    assert (caught.value.found, caught.value.expected) == (found, expected)


def test_a_method_that_is_called_with_names_is_checked_too(site: Site) -> None:
    scores = "import numpy; return numpy.zeros(batch.targets_T.shape, 'f')"
    site.add("right", WORKS.replace("return batch", scores))
    right = load_backend(site.found("right"), "train").train(TRAIN, CONTEXT)
    zeros_T = np.zeros(5, np.int64)
    batch = Batch(zeros_T, zeros_T, np.ones(5, np.float32), zeros_T[:1])
    assert right.log_probs(adapter="a", batch=batch).shape == (5,)
    assert right.accumulate(seed=0, learner="a", batch=batch).shape == (5,)


def test_a_model_that_cannot_answer_is_a_wrong_result(site: Site) -> None:
    backend = backend_that(site, "mute", "class Loaded(RowByRow)", "class Loaded")
    with pytest.raises(PluginError, match="wrong result from vox_load"):
        backend.load(LOAD, CONTEXT)


def test_a_foreign_exception_is_the_plugins_failure_and_is_kept(site: Site) -> None:
    backend = backend_that(site, "raising", MADE, "1 / 0")
    with pytest.raises(PluginError, match="failed in vox_train") as caught:
        backend.train(TRAIN, CONTEXT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exit_from_a_hook_is_no_exit_of_vox(site: Site) -> None:
    backend = backend_that(site, "exiting", f"return {MADE}", "raise SystemExit(0)")
    with pytest.raises(PluginError, match="failed in vox_train"):
        backend.train(TRAIN, CONTEXT)


def test_errors_in_the_users_terms_pass(site: Site) -> None:
    error = 'raise DataError("D002", "empty", remedy="fill it")'
    backend = backend_that(site, "telling", f"return {MADE}", error)
    with pytest.raises(DataError, match="empty"):
        backend.train(TRAIN, CONTEXT)


def test_an_interrupt_passes(site: Site) -> None:
    backend = backend_that(site, "interrupted", f"return {MADE}", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        backend.train(TRAIN, CONTEXT)


def test_what_is_computed_late_fails_in_the_same_way(site: Site) -> None:
    lazy = "MergeResult((('w', 1 / 0) for _ in '1'))"
    backend = backend_that(site, "late", 'MergeResult(iter([("w", 1)]))', lazy)
    tensors = backend.merge(MERGE, CONTEXT).tensors
    with pytest.raises(PluginError, match="failed in vox_merge"):
        next(tensors)
    backend = backend_that(site, "later", "return tokens_T", "1 / 0")
    model = backend.load(LOAD, CONTEXT)
    with pytest.raises(PluginError, match="failed in logits"):
        model.logits(cast(Any, "T"))


# --- all of it ------------------------------------------------------------------------------------


@pytest.fixture
def crowd(site: Site) -> Site:
    """A good backend among bad company."""
    site.add("bestofall")
    site.add("exits", NOT_IMPORTABLE, manifest=MANIFEST.replace("1000000", "1"))
    site.add("newer", NOT_IMPORTABLE, api="7.0")
    no_manifest(site)
    return site


def test_a_backend_is_chosen_and_loaded_among_broken_ones(crowd: Site) -> None:
    backend, selection = choose(Request("train", allow_cpu=True))
    assert (backend.id, selection.chosen) == ("bestofall", "bestofall")
    assert selection.why.startswith("backend bestofall 0.1.0, higher priority than ")
    assert backend.train(TRAIN, CONTEXT).state("adapter").step == 7


def test_one_asked_for_by_name_that_cannot_be_imported_is_an_error(crowd: Site) -> None:
    with pytest.raises(BackendError, match="'exits' is installed but broken"):
        choose(Request("train", explicit="exits"))


def listed() -> tuple[Verdict, ...]:
    return Seen().verdicts(Request("load"))


def test_all_backends_are_listed_and_none_imported(crowd: Site) -> None:
    told = {verdict.id: verdict for verdict in listed()}
    assert {name: told[name].status for name in ("bad", "bestofall", "exits", "newer")} == {
        "bad": "broken",
        "bestofall": "available",
        "exits": "available",
        "newer": "rejected",
    }
    assert told["bestofall"].reason == "a CPU"
    assert "vox_x_exits" not in sys.modules


def test_a_plugin_that_is_no_backend_is_no_candidate(site: Site) -> None:
    site.add(
        "watcher",
        NOT_IMPORTABLE,
        manifest=MANIFEST.partition("[capabilities]")[0] + 'provides.hooks = ["vox_event"]\n',
    )
    assert site.found("watcher").fault is None
    assert "watcher" not in [verdict.id for verdict in listed()]
    for operation in ("train", "load"):
        with pytest.raises(BackendError, match="'watcher' is unusable") as caught:
            choose(Request(operation, explicit="watcher"))
        assert "no backend: its manifest has no [capabilities]" in caught.value.faults[0]


def test_plugins_can_be_disabled(crowd: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "bestofall, exits")
    told = {verdict.id: verdict.reason for verdict in listed()}
    assert told["bestofall"] == told["exits"] == "blocked by VOX_DISABLE_PLUGINS"
    monkeypatch.setenv("VOX_DISABLE_PLUGINS", "bestofal")
    with pytest.raises(ConfigError, match="names unknown plugins"):
        listed()


def test_importing_the_host_is_cheap() -> None:
    script = "import sys, vox_core.host; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    heavy = {"numpy", "torch", "transformers"}
    assert not heavy & set(done.stdout.split())


def test_a_plugin_of_the_catalog_that_is_not_here_is_not_unknown(monkeypatch) -> None:
    from vox_core.host import doctor

    monkeypatch.setattr(doctor, "known_plugins", lambda: {"mlx": object()})
    error = doctor.unknown_plugin("mlx", ["cpu"])
    assert (error.what, error.remedy) == ("plugin 'mlx' is not installed", "vox plugin install mlx")
    assert "unknown" in doctor.unknown_plugin("mlxx", ["cpu"]).what

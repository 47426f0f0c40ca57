"""Upload a run or a model folder to the Hugging Face hub, and compare what arrived.

All files go in one commit, so that a reader finds the old files or the new ones. Then the hub is
asked for the digest of each file in that commit: SHA-256 of those in large file storage, git's
SHA-1 of the others.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.api.files import file_sha256
from vox_core.api.models import (
    CONFIG,
    MANIFEST,
    TOKENIZER_FILES,
    promoted,
    read_probe,
    resolve_reference,
)
from vox_core.api.runs import PLAN, RunFolder, locked
from vox_core.errors import AdapterError, ConfigError, InputError, OutputError, ProofError

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

CARD = "README.md"
WEIGHTS = "adapter_model.safetensors"
MANIFESTS = (MANIFEST, "vox_merge.json")
OF_AN_ADAPTER = (CONFIG, WEIGHTS, MANIFEST, CARD, *TOKENIZER_FILES)
"""A run folder holds much else: rows of the data, losses, checkpoints, paths of this machine."""
OF_A_MODEL = (
    *("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.gguf", "Modelfile"),
    *("LICENSE*", "NOTICE*", CARD),
)


@dataclass(frozen=True, slots=True)
class Upload:
    """Files to upload, before any request.

    Args:
        repository: OWNER/NAME.
        files: contents by their names there: a file of this machine, or bytes where something is
            said otherwise than here.
        kept: names in the folder that are not uploaded.
    """

    repository: str
    files: Mapping[str, Path | bytes]
    kept: tuple[str, ...]

    @property
    def bytes(self) -> int:
        sizes = (c.stat().st_size if isinstance(c, Path) else len(c) for c in self.files.values())
        return sum(sizes)


@dataclass(frozen=True, slots=True)
class Pushed:
    """A commit on the hub whose files have the digests of those here.

    Args:
        others: files of the repository that were there before and are not of this upload.
    """

    repository: str
    url: str
    commit: str
    private: bool
    files: tuple[str, ...]
    bytes: int
    others: tuple[str, ...]
    kept: tuple[str, ...]


def push(
    reference: str,
    repository: str,
    *,
    base_model: str | None = None,
    public: bool = False,
    announce: Callable[[Upload], None] = lambda upload: None,
) -> Pushed:
    """Upload what `reference` names to `repository`, which is made if it does not exist.

    Args:
        reference: a run folder, another folder with an adapter or a model, or a promoted name.
        base_model: OWNER/NAME of the base model, if the folder names it by a path.
        public: make a public repository, or commit to one. Private is the default.
        announce: is told what will be uploaded, before any request.

    Raises:
        InputError: found before any upload.
        OutputError: O005, the hub refused, or could not be reached; there is no commit.
        ProofError: V004, the adapter is not the one that training wrote; V007, the hub has other
            content than this machine.
    """
    _require_id(repository, "OWNER/NAME")
    with ExitStack() as stack:
        folder = Path((promoted(reference) or {"reference": reference})["reference"])
        if (folder / PLAN).is_file():  # it may not be resumed meanwhile
            stack.enter_context(locked(RunFolder(folder)))
        upload = _prepared(folder, repository, base_model)
        announce(upload)
        return _uploaded(upload, public)


# --- what is uploaded -----------------------------------------------------------------------------


def _prepared(folder: Path, repository: str, base_model: str | None) -> Upload:
    if not folder.is_dir():
        raise _nothing(folder, "no such folder")
    model = RunFolder(folder).model
    is_adapter = not model and (folder / WEIGHTS).is_file()
    if is_adapter and (folder / PLAN).is_file():
        read_probe(resolve_reference(str(folder)))
    at = model or folder
    names = [*_named(at, OF_AN_ADAPTER if is_adapter else OF_A_MODEL)]
    if not any(name.endswith((".safetensors", ".gguf")) for name in names):
        raise _nothing(folder, "no adapter, no safetensors and no GGUF file")
    files: dict[str, Path | bytes] = {name: at / name for name in names}
    base = _require_id(base_model, "--base-model") if base_model else _base_of(folder)
    if is_adapter:
        files[CONFIG] = _config(folder, base)
    for name in {*MANIFESTS} & files.keys():
        files[name] = _without_path(at, name)
    if (card := folder / CARD).is_file():
        files[CARD] = _card(card, repository, base)
    kept = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    return Upload(repository, files, tuple(sorted(kept - files.keys() - {model and model.name})))


def _named(folder: Path, patterns: Iterable[str]) -> Iterator[str]:
    files = (path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    names = sorted(path.name for path in files)
    return (name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns))


def _base_of(folder: Path) -> str | None:
    """Return the name of the base model on the hub, as the folder says it; None if it does not."""
    run = RunFolder(folder)
    for name in MANIFESTS:
        if (folder / name).is_file():
            hub: str | None = (run.read(name).get("base") or {}).get("hub")
            return hub
    if not (folder / CONFIG).is_file():
        return None
    named = str(run.read(CONFIG).get("base_model_name_or_path"))
    return named if _is_id(named) and not Path(named).exists() else None


def _config(folder: Path, base: str | None) -> bytes:
    """The adapter's configuration, whose base model everybody can find."""
    config = RunFolder(folder).read(CONFIG)
    if base is None:
        raise ConfigError(
            "C004",
            "the base model has no name on the hub, so nobody else could load the adapter",
            where=folder / CONFIG,
            found=f"the path {config.get('base_model_name_or_path')}",
            expected="OWNER/NAME",
            remedy="name its repository with --base-model; if it is in none, push it first, or the "
            "result of `vox merge`",
        )
    return _json({**config, "base_model_name_or_path": base})


def _without_path(folder: Path, name: str) -> bytes:
    manifest = RunFolder(folder).read(name)
    (manifest.get("base") or {}).pop("path", None)
    return _json(manifest)


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _card(path: Path, repository: str, base: str | None) -> bytes:
    """The model card as it reads there: how to load it, and only a base model that the hub has."""
    import yaml
    from huggingface_hub import ModelCard

    name = repository.rpartition("/")[2]
    here = {
        "    vox chat .\n    vox merge .": f"    hf download {repository} --local-dir {name}\n"
        f"    vox chat {name}\n    vox merge {name}",
        "    vox chat RUN\n": f"    vox chat {repository}\n",
        'from_pretrained(".")': f'from_pretrained("{repository}")',
        'from_pretrained("RUN/model")': f'from_pretrained("{repository}")',
        ", from the run's folder `model`": "",
        f" `{PLAN}` holds every setting.": "",
    }
    try:
        text = path.read_text("utf-8")
        for said, there in here.items():
            text = text.replace(said, there)
        card = ModelCard(text, ignore_metadata_errors=True)
    except (ValueError, yaml.YAMLError) as error:
        raise AdapterError(
            "A001",
            "the model card cannot be read",
            where=path,
            found=error,
            expected="UTF-8 text, with its metadata as YAML between two lines of ---",
            remedy="correct it, or move it away",
        ) from error
    card.data["base_model"] = base
    return str(card.content).encode()


def _nothing(folder: Path, found: str) -> InputError:
    return AdapterError(
        "A001",
        "there is nothing to push",
        where=folder,
        found=found,
        expected="a run that has ended, or a folder of `vox merge` or `vox export`",
        remedy="correct the path; an interrupted run goes on with `vox train --resume`",
    )


def _is_id(name: str) -> bool:
    return bool(re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII))


def _require_id(name: str, option: str) -> str:
    if _is_id(name):
        return name
    raise ConfigError(
        "C002",
        "this is not the name of a repository",
        where=option,
        found=name,
        expected="OWNER/NAME: letters, digits, - _ and . after your user name or organisation",
        remedy="such as me/support-adapter",
    )


# --- the hub --------------------------------------------------------------------------------------


def _uploaded(upload: Upload, public: bool) -> Pushed:
    from huggingface_hub import CommitOperationAdd, HfApi

    api, repository = HfApi(), upload.repository
    with _explained(repository, "the files could not be uploaded, and the repository is as it was"):
        api.whoami()
        url = api.create_repo(repository, private=not public, exist_ok=True)
        before = api.model_info(repository)
        if bool(before.private) is public:
            raise _other_visibility(url, public)
        operations = [CommitOperationAdd(*each) for each in upload.files.items()]
        commit = api.create_commit(repository, operations, commit_message="Upload with vox").oid
    with _explained(repository, "the files were uploaded, and could not be compared"):
        _require_same(api, upload, commit)
    there = {each.rfilename for each in before.siblings or ()}
    return Pushed(
        repository,
        str(url),
        commit,
        not public,
        tuple(upload.files),
        upload.bytes,
        tuple(sorted(there - upload.files.keys() - {".gitattributes"})),
        upload.kept,
    )


def _require_same(api: HfApi, upload: Upload, commit: str) -> None:
    """Compare each file of the commit with the one here (V007)."""
    infos = api.get_paths_info(upload.repository, [*upload.files], revision=commit)
    there: dict[str, Any] = {info.path: info for info in infos}
    differ = [
        name
        for name, content in upload.files.items()
        if name not in there or not _is_same(content, there[name])
    ]
    if differ:
        raise ProofError(
            "V007",
            "the hub has other content than this machine",
            where=f"{upload.repository}, commit {commit[:12]}",
            found=f"another digest, or none: {', '.join(differ)}",
            expected="the digests of the files here",
            remedy="push again; if it stays so, report it, and do not use that commit",
        )


def _is_same(content: Path | bytes, there: RepoFile) -> bool:
    if there.lfs is None:
        data = content.read_bytes() if isinstance(content, Path) else content
        return there.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if isinstance(content, Path):
        return bool(there.lfs.sha256 == file_sha256(content))
    return bool(there.lfs.sha256 == hashlib.sha256(content).hexdigest())


def _other_visibility(url: str, public: bool) -> InputError:
    if public:
        found, remedy = (
            "a private one",
            "leave out --public, or make it public on its settings page",
        )
    else:
        found, remedy = "a public one", "pass --public if everybody may read the files"
    return ConfigError(
        "C002",
        "the repository exists with another visibility",
        where=url,
        found=found,
        remedy=remedy,
    )


@contextmanager
def _explained(repository: str, what: str) -> Iterator[None]:
    """Turn errors of huggingface_hub into OutputError O005 with what to do."""
    from huggingface_hub import constants, errors
    from huggingface_hub.errors import HTTPError as ConnectionFailure  # type: ignore[attr-defined]

    try:
        yield
    except (errors.HfHubHTTPError, ConnectionFailure, OSError, RuntimeError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        found = " ".join(str(_root(error)).split())[:300]
        if constants.is_offline_mode():
            found, remedy = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
        elif isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
            remedy = "log in with `hf auth login`, with a token that may write"
        elif status in (403, 404):
            remedy = f"use a token that may write to {repository}, or another OWNER/NAME"
        elif isinstance(error, ValueError):
            remedy = f"correct {CARD}, or report this"
        else:
            remedy = "check the connection and run again; what was uploaded is not sent twice"
        raise OutputError(
            "O005",
            what,
            where=f"{constants.ENDPOINT}/{repository}",
            found=found,
            remedy=remedy,
        ) from error


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error

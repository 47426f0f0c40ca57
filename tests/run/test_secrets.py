"""What a run leaves behind: no secret of the environment, and modes as the umask says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from vox_core.errors import ModelError
from vox_core.run.train import train

SECRETS = {
    "HF_TOKEN": "hf_aaaabbbbccccddddeeee",
    "HUGGING_FACE_HUB_TOKEN": "hf_ffffgggghhhhiiii",
    "WANDB_API_KEY": "0123456789abcdefwandb",
    "AWS_SECRET_ACCESS_KEY": "aws+secret/key0123",
    "GITHUB_TOKEN": "ghp_0123456789abcdef",
    "MY_PASSWORD": "correct-horse-battery",
    "PIP_INDEX_URL": "https://user:pip-pass-word@index.example/simple",
    "https_proxy": "http://user:proxy-pass-word@127.0.0.1:9",
}
HIDDEN = [*(v for k, v in SECRETS.items() if "://" not in v), "pip-pass-word", "proxy-pass-word"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_run_leaves_no_secret_and_keeps_the_umask(
    umask, tiny, settings, tmp_path, monkeypatch, capfd
):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    before = os.umask(umask)
    try:
        told: list[object] = []
        run = train(settings(tiny("llama"), save_every=1, max_steps=2), observe=told.append).run
    finally:
        os.umask(before)
    output = "".join((*capfd.readouterr(), *map(repr, told))).encode()
    files = [p for root in (run, tmp_path / "cache") for p in [root, *root.rglob("*")]]
    written = b"".join(path.read_bytes() for path in files if path.is_file())
    for secret in HIDDEN:
        assert secret.encode() not in output + written
    for path in files:
        mode = stat.S_IMODE(path.stat().st_mode)
        expected = (0o777 if path.is_dir() else 0o666) & ~umask
        assert mode & ~expected == 0, f"{path} {mode:o}"
        if path.is_relative_to(run) and path.name != ".lock":
            assert mode == expected, f"{path} {mode:o}"


def test_an_error_shows_no_credentials() -> None:
    url = "https://user:s3cret@hub.example/x"
    error = ModelError(
        "M007", f"cannot reach {url}", where=Path("x"), found=url, faults=[url], remedy=f"see {url}"
    )
    assert "s3cret" not in str(error) + repr(vars(error))
    assert str(error).count("https://hub.example/x") == 4

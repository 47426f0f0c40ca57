"""Conversations: piped and typed, with commands, interrupts and memory."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.services import Voice
from vox_core.cli.chat import HELP, Conversation

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def voice(monkeypatch: pytest.MonkeyPatch) -> Voice:
    service = Voice()
    monkeypatch.setattr("vox_core.run.load.open_model", service)
    return service


def test_piped_lines_are_answered_without_prompts(vox, voice: Voice) -> None:
    done = vox("chat", "runs/a", stdin="one\n\ntwo")
    assert (done.code, done.out) == (0, "1:ONE\n3:TWO\n")
    assert voice.calls[0][0] == "runs/a"
    assert voice.calls[0][1].temperature == 0.7


def test_reset_forgets(vox, voice: Voice) -> None:
    assert vox("chat", "m", stdin="one\n/reset\ntwo\n").out == "1:ONE\n1:TWO\n"


def test_exit_ends(vox, voice: Voice) -> None:
    assert vox("chat", "m", stdin="one\n/exit\ntwo\n").out == "1:ONE\n"


@pytest.mark.parametrize("line", ["/help", "/nonsense"])
def test_other_commands_give_help_and_no_answer(vox, voice: Voice, line: str) -> None:
    done = vox("chat", "m", stdin=f"{line}\n")
    assert done.out == ""
    assert HELP in done.err


def test_a_path_is_no_command(vox, voice: Voice) -> None:
    assert vox("chat", "m", stdin="/etc/hosts holds what?\n").out == "1:/ETC/HOSTS HOLDS WHAT?\n"


def test_ctrl_c_stops_one_answer_and_keeps_what_was_said(capsys) -> None:
    conversation = Conversation(Voice(interrupted=1))  # type: ignore[arg-type]
    conversation.answer("one")
    assert conversation.messages[-1] == {"role": "assistant", "content": "1:"}
    conversation.answer("two")
    assert capsys.readouterr().out == "1:\n3:TWO\n"


TYPED = """
import os
os.login_tty(0)  # makes Ctrl-C on it SIGINT
import vox_core.run.load
from tests.cli.services import Voice
vox_core.run.load.open_model = Voice()
from vox_core.cli import main
main(["chat", "m"])
"""


def test_typed_lines_get_prompts_until_ctrl_d() -> None:
    """A real terminal: a line, Ctrl-C at the prompt, a line, Ctrl-D."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TYPED],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        cwd=ROOT,
        env={**os.environ, "TERM": "dumb"},
    )
    os.close(follower)
    screen = _until(leader, "> ")
    assert "m. /reset forgets" in screen
    os.write(leader, b"one\n")
    _until(leader, "1:ONE\r\n> ")
    _until(leader, "\r\n> ", press=b"\x03")
    os.write(leader, b"two\n")
    _until(leader, "3:TWO\r\n> ")
    os.write(leader, b"\x04")
    assert process.wait(timeout=120) == 0
    os.close(leader)


def _until(leader: int, end: str, press: bytes = b"") -> str:
    """What is written until it ends with `end`.

    `press` is pressed every two seconds: Python's readline loses a SIGINT that comes after the
    prompt is written and before it waits for a key.
    """
    text = ""
    for _ in range(20):
        os.write(leader, press)
        while not text.endswith(end) and select.select([leader], [], [], 2)[0]:
            text += os.read(leader, 1024).decode()
        if text.endswith(end):
            return text
    raise AssertionError(text)

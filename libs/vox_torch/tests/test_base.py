"""Loading a base model beside other threads."""

from __future__ import annotations

import threading

from transformers.utils import logging

from vox_torch.base import quiet


def test_transformers_stays_quiet_while_another_thread_ends_loading() -> None:
    within, ended, seen = threading.Event(), threading.Event(), list[bool]()

    def load() -> None:
        with quiet():
            within.set()
            ended.wait()
            seen.append(logging.is_progress_bar_enabled())

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    other = threading.Thread(target=load)
    with quiet():
        other.start()
        within.wait(0.2)  # in vain: one at a time
    ended.set()
    other.join()
    assert seen == [False]
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before

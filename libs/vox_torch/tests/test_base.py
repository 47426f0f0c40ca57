"""Loading a base model beside other threads."""

from __future__ import annotations

import threading

from transformers.utils import logging

from vox_torch.base import SILENCE, quiet


def test_one_thread_at_a_time_silences_transformers() -> None:
    before, tried = (logging.get_verbosity(), logging.is_progress_bar_enabled()), list[bool]()
    other = threading.Thread(target=lambda: tried.append(SILENCE.acquire(blocking=False)))
    with quiet():
        other.start()
        other.join()
        assert not logging.is_progress_bar_enabled()
    assert tried == [False]
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before

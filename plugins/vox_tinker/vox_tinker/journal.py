"""Requests and results of training clients, in an SQLite database.

A request is written here before it is acknowledged, and its result before a client sees it. After a
restart, the requests since a client's last resume point (adapter and optimizer state in its run
folder) are computed again, which gives the same numbers, because every random number is a function
of seed and step.

A commit survives the death of the process. After a power failure the last ones may be missing.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from vox_tinker.futures import Answer

KEPT = 4096
"""Results of a training client that are kept, counted from its last resume point."""
_TABLES = """
CREATE TABLE IF NOT EXISTS requests (
    model_id TEXT, seq_id INTEGER, verb TEXT, digest BLOB, body BLOB, answer BLOB, media_type TEXT,
    PRIMARY KEY (model_id, seq_id)
);
CREATE TABLE IF NOT EXISTS resumes (model_id TEXT PRIMARY KEY, seq_id INTEGER);
"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A request, and its result once it has one.

    Args:
        body: empty if a resume point made it unnecessary.
    """

    seq_id: int
    verb: str
    digest: bytes
    body: bytes
    answer: Answer | None


class Journal:
    """Requests and results of all training clients of a folder."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._database = sqlite3.connect(path, timeout=60)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_TABLES)

    def close(self) -> None:
        self._database.close()

    def add(self, model_id: str, seq_id: int, verb: str, digest: bytes, body: bytes) -> None:
        """Write a request."""
        row = (model_id, seq_id, verb, digest, body)
        with self._database as database:
            database.execute("INSERT INTO requests VALUES (?, ?, ?, ?, ?, NULL, NULL)", row)

    def answer(self, model_id: str, seq_id: int, answer: Answer, *, resumes: bool = False) -> None:
        """Write a result.

        Args:
            resumes: there is a resume point behind this request, so that it and those before it
                are never computed again.
        """
        key = (model_id, seq_id)
        with self._database as database:
            database.execute(
                "UPDATE requests SET answer = ?, media_type = ? WHERE model_id = ? AND seq_id = ?",
                (answer.content, answer.media_type, *key),
            )
            if resumes:
                database.execute("INSERT OR REPLACE INTO resumes VALUES (?, ?)", key)
                database.execute(
                    "UPDATE requests SET body = x'' WHERE model_id = ? AND seq_id <= ?", key
                )
                database.execute(
                    "DELETE FROM requests WHERE model_id = ? AND seq_id <= ?",
                    (model_id, seq_id - KEPT),
                )

    def find(self, model_id: str, seq_id: int) -> Kept | None:
        """Return a request; None if there is none, or it was forgotten."""
        found = self._rows("seq_id = ?", model_id, seq_id)
        return found[0] if found else None

    def since(self, model_id: str) -> list[Kept]:
        """Return the requests after the resume point, in their order."""
        after = self.resume_point(model_id)
        return self._rows("seq_id > ?", model_id, -1 if after is None else after)

    def resume_point(self, model_id: str) -> int | None:
        """Return the request that the newest resume point is behind."""
        query = "SELECT seq_id FROM resumes WHERE model_id = ?"
        found = self._database.execute(query, (model_id,)).fetchone()
        return None if found is None else int(found[0])

    def __contains__(self, model_id: str) -> bool:
        query = "SELECT 1 FROM requests WHERE model_id = ? LIMIT 1"
        return self._database.execute(query, (model_id,)).fetchone() is not None

    def forget(self, model_id: str) -> None:
        """Delete everything of a training client."""
        with self._database as database:
            for table in ("requests", "resumes"):
                database.execute(f"DELETE FROM {table} WHERE model_id = ?", (model_id,))

    def models(self, session_id: str) -> list[str]:
        """Return the training clients of a session."""
        query = "SELECT DISTINCT model_id FROM requests WHERE model_id GLOB ?"
        return [found for (found,) in self._database.execute(query, (f"{session_id}:*",))]

    def _rows(self, which: str, model_id: str, seq_id: int) -> list[Kept]:
        query = (
            "SELECT seq_id, verb, digest, body, answer, media_type FROM requests "
            f"WHERE model_id = ? AND {which} ORDER BY seq_id"
        )
        return [
            Kept(seq, verb, digest, body, None if content is None else Answer(content, media))
            for seq, verb, digest, body, content, media in self._database.execute(
                query, (model_id, seq_id)
            )
        ]

"""What somebody else's text may do to a terminal: nothing."""

from __future__ import annotations

import json

import pytest

from tests.core.plugin_site import MANIFEST, Site
from vox_core.cli import failures, root
from vox_core.cli.output import counted, print_json, printable

STEERING = "a\x1b[2J\r\x9b1m\u202eb\ud800"


def test_what_steers_is_written_out() -> None:
    assert printable(STEERING) == r"a\x1b[2J\r\x9b1m\u202eb\ud800"
    assert printable("é\n\t日本") == r"é\n\t日本"
    assert printable("a\n\tb\x07", lines=True) == "a\n\tb\\x07"


@pytest.mark.parametrize(
    ("number", "noun", "shown"),
    [
        (0, "row", "0 rows"),
        (1, "row", "1 row"),
        (2000, "row", "2,000 rows"),
        (1.0, "epoch", "1 epoch"),
        (1.00433, "epoch", "1.004 epochs"),
    ],
)
def test_counts_agree_with_their_nouns(number: float, noun: str, shown: str) -> None:
    assert counted(number, noun) == shown


def test_json_says_the_same_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": STEERING})
    told = capsys.readouterr().out
    assert json.loads(told) == {"a": STEERING}
    assert told.strip().isascii() and told.strip().isprintable()


@pytest.mark.usefixtures("others_disabled")
@pytest.mark.parametrize("command", ["plugin list", "plugin doctor", "backend list"])
def test_ids_and_versions_of_packages(vox, site: Site, command: str) -> None:
    site.describe("vox-x-bad", "[vox_core.plugins]\nb\x1b[2Jd = vox_x_gone:backend\n")
    site.add("old", manifest=MANIFEST.replace("0.1.0", "0.1\x9b"))
    metadata = next(site.folder.glob("vox_x_old-*/METADATA"))
    metadata.write_text(metadata.read_text().replace("Version: ", "Version: \x9b2J"))
    done = vox(*command.split())
    assert r"b\x1b[2Jd" in done.out
    assert not {"\x1b", "\x9b"} & {*done.out, *done.err}


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    failures.run(root, ["plugin", "info", "\x1b[2J", "--json"])
    told = capsys.readouterr()
    assert "\x1b" not in told.out + told.err and r"\x1b[2J" in told.err

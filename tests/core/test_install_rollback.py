"""An environment that is put back: what was changed, what is new, what cannot be restored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.install_samples import wheel
from vox_core.errors import WorkError
from vox_core.host.environment import Environment
from vox_core.host.rollback import Difference, leftovers, restored_on_failure


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """A prefix with one distribution, unpacked, and a file that belongs to none."""
    import zipfile

    monkeypatch.setenv("VOX_CACHE", str(tmp_path / "cache"))
    prefix = tmp_path / "prefix"
    site, scripts = prefix / "lib/site-packages", prefix / "bin"
    for folder in (site, scripts):
        folder.mkdir(parents=True)
    name = wheel(str(tmp_path), "mine", "1.0", {"mine/a.py": "a", "mine/deep/b.py": "b"})
    zipfile.ZipFile(tmp_path / name).extractall(site)
    (site / "stray.py").write_text("stray")
    monkeypatch.syspath_prepend(str(site))
    return Environment(
        Path(sys.executable), prefix, tmp_path, (site, scripts), tmp_path, True, None
    )


def state(environment: Environment) -> dict[str, tuple[bytes, int, int]]:
    files = (path for path in environment.prefix.rglob("*") if not path.is_dir())
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in files
        if path.name != ".vox-lock"
    }


def folders_of(environment: Environment) -> set[Path]:
    return {path for path in environment.prefix.rglob("*") if path.is_dir()}


def test_nothing_is_undone_without_a_failure(environment: Environment) -> None:
    site = environment.site_packages
    with restored_on_failure(environment, ["mine"]):
        (site / "new.py").write_text("new")
    assert (site / "new.py").read_text() == "new"
    assert not list(site.parent.glob(".vox-before-*"))


def spoil(environment: Environment) -> None:
    """Change, remove and add, also where there was no folder before."""
    site, prefix = environment.site_packages, environment.prefix
    (site / "mine/a.py").write_text("changed")
    (site / "mine/deep/b.py").unlink()
    (site / "mine/deep").rmdir()
    (site / "other/deep").mkdir(parents=True)
    (site / "other/deep/new.py").touch()
    (site / "empty").mkdir()
    (prefix / "bin/new").symlink_to("nowhere")
    (prefix / "share/man").mkdir(parents=True)
    (prefix / "share/man/new.1").touch()


def fail(environment: Environment, error: type[BaseException], trampled: Path | None) -> None:
    with restored_on_failure(environment, ["mine", "not-there"]):
        spoil(environment)
        if trampled:
            trampled.write_text("trampled on")
        raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_all_is_undone(environment: Environment, error: type[BaseException]) -> None:
    (environment.site_packages / "mine/a.py").chmod(0o755)
    before, folders = state(environment), folders_of(environment)
    with pytest.raises(error):
        fail(environment, error, None)
    assert (state(environment), folders_of(environment)) == (before, folders)


def test_what_cannot_be_put_back_is_named(environment: Environment) -> None:
    stray = environment.site_packages / "stray.py"
    with pytest.raises(WorkError) as raised:
        fail(environment, ValueError, stray)
    assert raised.value.code == "VOX-I009"
    assert raised.value.faults == (f"changed or gone: {stray}",)
    assert raised.value.remedy == "install again what these files belong to"  # there is no copy
    (left,) = leftovers(environment)
    assert left.distributions == ("mine", "not-there")


def test_a_copy_that_could_not_be_put_back_is_named(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr("vox_core.host.rollback.shutil.move", full)
    with pytest.raises(WorkError) as raised:
        fail(environment, ValueError, None)
    (left,) = leftovers(environment)
    assert f"copies of {environment.site_packages / 'mine/a.py'}, " in raised.value.remedy
    assert str(left.folder) in raised.value.remedy


def test_what_belongs_to_nobody_is_put_back_if_it_was_replaced(environment: Environment) -> None:
    before = state(environment)
    with pytest.raises(ValueError, match="stop"):
        replace_and_fail(environment, environment.site_packages / "stray.py")
    assert state(environment) == before


def replace_and_fail(environment: Environment, stray: Path) -> None:
    with restored_on_failure(environment, []) as had:
        stray.unlink()
        assert had.difference() == Difference([], [stray], [])
        stray.write_text("another")
        assert had.difference() == Difference([stray], [], [])
        raise ValueError("stop")


def test_the_lock_is_where_one_may_write(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with restored_on_failure(environment, []):
        pass
    lock = environment.prefix / ".vox-lock"
    assert lock.stat().st_mode & 0o777 == 0o666  # for every user of the environment
    lock.unlink()
    lock.mkdir()  # where root, too, may not write
    with restored_on_failure(environment, []):
        assert (environment.site_packages / ".vox-lock").is_file()


def test_a_signal_is_a_failure_and_handlers_are_put_back(environment: Environment) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), restored_on_failure(environment, []):
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_one_at_a_time(environment: Environment) -> None:
    code = (
        "import sys; from pathlib import Path; from vox_core.host.environment import Environment;"
        "from vox_core.host.rollback import restored_on_failure; p = Path(sys.argv[1]);"
        "e = Environment(p, p, p.parent, (p / 'lib/site-packages', p / 'bin'), p, True, None);"
        "restored_on_failure(e, []).__enter__()"
    )
    with restored_on_failure(environment, []):
        done = subprocess.run(
            [sys.executable, "-c", code, str(environment.prefix)], capture_output=True, check=False
        )
    assert b"InputError" in done.stderr and b"VOX-I011" in done.stderr

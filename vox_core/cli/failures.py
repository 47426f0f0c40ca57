"""Turn every exception of a command into an exit code and a message on stderr.

    VoxError               its own text and exit code
    click's usage errors   the same style, with the nearest command or option; exit 2
    Ctrl-C                 exit 130
    a closed pipe          nothing; exit 1 (click does that by itself)
    anything else          reported as a bug of vox, or of the plugin whose code raised it; exit 1

With `--json` the error is also printed as one JSON object on stdout. Only `--debug` shows a
traceback. Both flags are searched for in the raw arguments, so that they work even where parsing
fails.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from vox_core.cli.lazy import UnknownCommand
from vox_core.errors import ConfigError, PluginError, StorageError, VoxError, WorkError
from vox_core.errors import command as command_line
from vox_core.files import storage_error

STOPPED = 130
PEERS_COMMANDS = {
    "train": "sft lora finetune fine-tune tune",
    **{f"train --objective {name}": name for name in ("dpo", "orpo", "kto", "grpo", "ppo")},
    "train --resume": "resume",
    "merge": "fuse merge-lora",
    "generate": "inference infer",
    "export": "convert quantize",
    "serve": "server api webui vllm-serve",
    "eval": "evaluate lm-eval",
    "model pull": "download",
    "data check": "preprocess",
    "push": "upload",
    **{f"runs {name}": name for name in ("show", "watch", "compare", "plot")},
}
"""Command of vox -> its names in peers."""
KEYS = ("code", "what", "where", "found", "expected", "remedy")


def run(
    command: click.Command,
    arguments: Sequence[str],
    report: Callable[[VoxError], None] | None = None,
) -> int:
    """Run `command`, report any error, and return the exit code.

    Args:
        report: receives the error; None prints it.
    """
    try:
        result = command.main(list(arguments), prog_name="vox", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as stop:
        _show_stop(stop, arguments)
        return STOPPED
    except Exception as error:  # noqa: BLE001 - the boundary
        before = error.__context__
        if isinstance(error, OSError) and isinstance(before, KeyboardInterrupt):
            _show_stop(before, arguments)  # click had no terminal any more for its line end
            return STOPPED
        return _report(error, arguments, report)
    return result if isinstance(result, int) else 0


@contextmanager
def kept_if_stopped(kept: str) -> Iterator[None]:
    """Have Ctrl-C within the block print `kept`, and that the same command continues there."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(kept)
        raise


def _show_stop(stop: BaseException, arguments: Sequence[str]) -> None:
    from vox_core.cli.output import say

    kept = getattr(stop.__cause__ or stop, "__notes__", ())  # click's Abort has it as its cause
    say("; ".join(["stopped", *kept]))
    if kept:  # the same command continues there
        say(f"next: {command_line('vox', *arguments)}")


def describe(error: VoxError) -> dict[str, Any]:
    """Return the error as a JSON object."""
    return {**{key: getattr(error, key) for key in KEYS}, "faults": list(error.faults)}


def _report(
    error: Exception, arguments: Sequence[str], report: Callable[[VoxError], None] | None
) -> int:
    from vox_core.cli.output import print_json, say, silence

    if "--debug" in arguments:
        import traceback

        traceback.print_exception(error)
    reported = _as_vox_error(error)
    reported.name_sources()
    (report or say)(reported)
    if "--json" in arguments and not report:
        try:
            print_json({"error": describe(reported)})
        except OSError:  # closed or full
            silence(sys.stdout)
    return reported.exit_code


def _as_vox_error(error: Exception) -> VoxError:
    if isinstance(error, VoxError):
        return error
    from vox_core.host.load import missing_command, raised_by_plugin

    if isinstance(error, UnknownCommand):
        parents = error.ctx.command_path.split()[1:] if error.ctx else []
        with suppress(VoxError):  # a catalog with faults: the unknown command is the nearer fault
            if missing := missing_command(" ".join([*parents, error.name])):
                return missing
    if isinstance(error, click.UsageError):
        return usage_error(error)
    return _bug(error, raised_by_plugin(error))


def usage_error(error: click.UsageError) -> ConfigError:
    """Convert a usage error of click's to a `ConfigError`."""
    path = error.ctx.command_path if error.ctx else "vox"
    if isinstance(error, UnknownCommand):
        what, hint = error.message, _command_meant(error, path)
    elif isinstance(error, click.NoSuchOption):
        what, hint = f"unknown option {error.option_name}", _option_meant(error)
    else:
        what = error.format_message().rstrip(".").replace("\n", " ")
        what, chats = what[:1].lower() + what[1:], path == "vox chat" and "extra argument" in what
        hint = 'for one answer: vox generate RUN "…";' if chats else ""
    remedy = f"{hint} see `{path} --help`".lstrip()
    return ConfigError("C006", what, where=path, remedy=remedy)


def _command_meant(error: UnknownCommand, path: str) -> str:
    from vox_core.text import nearest

    spelt, peers = error.name.replace("_", "-"), PEERS_COMMANDS if path == "vox" else {}
    meant = [own for own, theirs in peers.items() if spelt in theirs.split()]
    names = {known: known.rpartition(" ")[2] for known in error.known}
    near = nearest(spelt, names.values())
    meant = meant or [known for known, name in names.items() if name == near]
    return f"did you mean {' or '.join(meant)}?" if meant else ""


def _option_meant(error: click.NoSuchOption) -> str:
    from vox_core.config.loading import meant

    params = error.ctx.command.params if error.ctx else []
    flags = (flag for param in params for flag in (*param.opts, *param.secondary_opts))
    known = [flag[2:] for flag in flags if flag.startswith("--")]
    hint = meant(error.option_name.lstrip("-"), known, "--{}".format)
    return f"{hint};" if hint and not hint.endswith(("?", ")")) else hint


def _bug(error: Exception, of_plugin: PluginError | None) -> VoxError:
    """Report an unexpected exception as a bug of vox or of a plugin, a missing library, or a fault
    of the disk."""
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("vox_"):
        what = f"the Python module {error.name!r} is missing"
        remedy = "vox plugin doctor names the plugin that needs it, and the next step"
        return PluginError("X001", what, found=of_plugin and of_plugin.found, remedy=remedy)
    if isinstance(error, PermissionError) and error.filename:
        return storage_error(error, error.filename)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = error.filename or "stdout"
        return StorageError("S001", "the disk is full", where=where, remedy="free space there")
    return of_plugin or WorkError(
        "X002",
        "this is a bug in vox",
        found=f"{type(error).__name__}: {error}",
        remedy="run the command again with --debug, and report the traceback",
    )

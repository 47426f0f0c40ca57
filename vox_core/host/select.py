"""Choose the backend for a request, and explain why the others were refused.

    seen = Seen()
    backend, selection = choose(Request("train", quant="nf4"), seen=seen)

Each part of a `Seen` is read on first use and then kept: the metadata of all packages is read once,
and a probe runs once, for the first request that needs it. Later changes are not noticed; after a
long wait, make a new `Seen`.

`select` is a pure function of the request, the installed plugins with what their probes found, and
the machine: no order of discovery, clock or environment variable changes its answer.

1. A backend chosen by name is used, or it is an error; there is no fallback.
2. Filters that need no hardware: blocked, API, platform, Python, distributions, capabilities, and
   whether the plugin allows automatic choice (`automatic`).
3. The probe results of the rest. *Not installed*, *broken* and *no such hardware* differ.
4. Rank: an accelerator with enough memory, then anything with enough memory; then the backend that
   the run being resumed was on; then the priority that plugins declare. A tie is an error.
5. Training does not choose the CPU by itself if the core detects an accelerator (probe.py) and

    its backend is                                                   training
    not installed, and the catalog has it                            asks
    broken, or written for another API, system or Python             asks
    without hardware, by its own probe: the driver is at fault       asks
    disabled or blocked: the user's own will                         goes on, and says so
    not capable of what the contract asks for                        goes on, and says so
    not installed, and nobody offers it                              goes on, and says so

The filters are in judge.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from vox_core.catalog import objections
from vox_core.errors import BackendError
from vox_core.host import discover, probe
from vox_core.host.blocked import blocked_plugins, blocking
from vox_core.host.discover import Found, known
from vox_core.host.judge import (
    ABSENT,
    Candidate,
    Judged,
    Request,
    Surroundings,
    Verdict,
    judge_all,
    lacking,
    static_refusal,
)
from vox_core.host.load import Backend, broken, load_backend
from vox_core.host.probe import Accelerator, Hardware, hardware_remedy, this_machine
from vox_core.text import nearest

TELLS_MORE = "see `vox backend explain`"
_GOES_ON = ("blocked", "capability")
_CONCESSIONS: tuple[tuple[str, Callable[[Request], Request]], ...] = (
    ("--quant none", lambda request: replace(request, quant="none")),
    ("--dtype auto", lambda request: replace(request, dtype=None)),
    ("--method lora", lambda request: replace(request, method="lora")),
)


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen backend, the reason in one line, its hardware, and every candidate's verdict."""

    chosen: str
    why: str
    hardware: Hardware
    verdicts: tuple[Verdict, ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON types, for the record of the run."""
        return asdict(self)


def select(
    request: Request, candidates: Sequence[Candidate], environment: Surroundings
) -> Selection:
    """Choose a backend for a request.

    Args:
        candidates: probed unless `static_refusal` has a reason against them.

    Raises:
        BackendError: B001 to B005; none can be chosen. B007; none should be without being asked.
    """
    judged = judge_all(request, candidates, environment)
    if request.explicit is not None:
        return _explicit(request, judged, environment)
    if not judged:
        raise _none_installed(environment)
    usable = [each for each in judged if each.refusal is None]
    if not usable:
        raise _none_usable(request, judged, environment)
    ranked = sorted(usable, key=lambda each: each.rank, reverse=True)
    if len(ranked) > 1 and ranked[0].rank == ranked[1].rank:
        raise _tie(ranked[0], ranked[1])
    idle = None if ranked[0].accelerates else _idle_accelerator(judged, environment)
    if idle and idle.remedy and request.operation == "train" and not request.allow_cpu:
        what = "training would run on the CPU while an accelerator lies idle"
        remedy = f"{idle.remedy}; or train on the CPU with --allow-cpu"
        raise BackendError("B007", what, found=idle.what, remedy=remedy)
    return _selection(ranked[0], _why(ranked, request) + (f"; {idle.what}" if idle else ""), judged)


# --- among several --------------------------------------------------------------------------------


def _explicit(request: Request, judged: Sequence[Judged], environment: Surroundings) -> Selection:
    chosen = next((each for each in judged if each.found.id == request.explicit), None)
    if chosen is None:
        raise _not_installed(request, judged, environment)
    if chosen.refusal and chosen.verdict.status == "broken":
        error = broken(chosen.found, chosen.refusal.reason).but(remedy=chosen.refusal.remedy)
        raise error from chosen.found.fault
    if chosen.refusal:
        raise _none_usable(request, judged, environment)
    return _selection(chosen, f"asked for ({request.asked})", judged)


def _selection(chosen: Judged, why: str, judged: Sequence[Judged]) -> Selection:
    verdict = chosen.verdict
    why = f"backend {verdict.id} {verdict.version}, {why}: {chosen.hardware.detail}"
    listed = (
        replace(each.verdict, status="chosen", reason=why) if each is chosen else each.verdict
        for each in judged
    )
    return Selection(verdict.id, why, chosen.hardware, tuple(listed))


def _why(ranked: Sequence[Judged], request: Request) -> str:
    """Explain why the first candidate ranks before the second."""
    level, resumed, priority = ranked[0].rank
    if len(ranked) == 1:
        return "the only usable backend" + ("" if level else ", though short of memory")
    second, (next_level, _, next_priority) = ranked[1].found.id, ranked[1].rank
    if level > next_level and level == 2 and not ranked[1].accelerates:
        return "an accelerator" + (" with enough memory" if request.memory_needed else "")
    if level > next_level:
        return f"has enough memory, and {second} has not"
    if resumed:
        return "the run was started on it"
    return f"higher priority than {second} ({priority} vs {next_priority})"


# --- idle accelerators ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Idle:
    """An accelerator that no backend drives: its state in words, and the command or step that would
    put it to use; empty where training goes on."""

    what: str
    remedy: str = ""


def _idle_accelerator(judged: Sequence[Judged], environment: Surroundings) -> _Idle | None:
    """Return the first idle accelerator that training asks about, else the first idle one."""
    found = (_idle(each, judged, environment) for each in environment.accelerators)
    idle = [each for each in found if each]
    return next((each for each in idle if each.remedy), next(iter(idle), None))


def _idle(
    accelerator: Accelerator, judged: Sequence[Judged], environment: Surroundings
) -> _Idle | None:
    drivers = [each for each in judged if _may_drive(each, accelerator)]
    if any(each.accelerates for each in drivers):
        return None
    if not drivers:
        return _without_backend(accelerator, environment)
    asking = [each for each in drivers if each.refusal is None or each.refusal.kind not in _GOES_ON]
    driver = (asking or drivers)[0]
    verdict, refusal = driver.verdict, driver.refusal
    if refusal is None or refusal.kind == "hardware":  # its own probe found at most a CPU
        state = f"cannot use it ({verdict.reason.removeprefix(ABSENT)})"
        remedy = hardware_remedy(accelerator.tag)
    else:
        state, remedy = f"is {verdict.status} ({verdict.reason})", refusal.remedy
    what = f"{accelerator.name} is here, but its backend {verdict.id!r} {state}"
    return _Idle(what, remedy if asking else "")


def _without_backend(accelerator: Accelerator, environment: Surroundings) -> _Idle:
    backend = accelerator.backend
    what = f"{accelerator.name} is here, but its backend {backend!r} is not installed"
    if who := environment.blocked.get(backend):
        return _Idle(f"{what} ({blocking(backend, who)})")
    if backend in environment.known:
        return _Idle(what, _install(backend, environment))
    return _Idle(
        f"{accelerator.name} is here and stays idle: vox knows no plugin for it to install"
    )


def _may_drive(judged: Judged, accelerator: Accelerator) -> bool:
    """Whether the backend may drive the accelerator; one chosen only by name may not."""
    manifest = judged.found.manifest
    if manifest is not None and not manifest.automatic:
        return False
    tagged = manifest is not None and manifest.requires.hardware_tag == accelerator.tag
    return tagged or judged.found.id == accelerator.backend


# --- errors ---------------------------------------------------------------------------------------


def _none_installed(environment: Surroundings) -> BackendError:
    fitting = [each.backend for each in environment.accelerators]
    example = next((name for name in [*fitting, "cpu"] if name in environment.known), "")
    what = "no backend is installed"
    remedy = _install(example, environment)
    return BackendError("B001", what, found="no installed plugin has [capabilities]", remedy=remedy)


def _none_usable(
    request: Request, judged: Sequence[Judged], environment: Surroundings
) -> BackendError:
    """Return the error with a table of every candidate, or of the named one, and its reason."""
    shown = [each for each in judged if request.explicit in (None, each.found.id)]
    rows = [each.verdict for each in shown]
    ids, versions = (max(len(getattr(v, key)) for v in rows) for key in ("id", "version"))
    who = "no usable backend" if request.explicit is None else f"{request.explicit!r} is unusable"
    wishes = {
        "quantisation": None if request.quant == "none" else request.quant,
        "dtype": request.dtype,
        "method": None if request.method == "lora" else request.method,
    }
    wished = ", ".join(f"{what} {value}" for what, value in wishes.items() if value is not None)
    return BackendError(
        "B002",
        f"{who} for `{request.operation}`" + (f" with {wished}" if wished else ""),
        faults=[f"{v.id:<{ids}}  {v.version:<{versions}}  {v.status:<8}  {v.reason}" for v in rows],
        remedy=(_who_is_able(judged, environment) or _way_out(request, shown)) + TELLS_MORE,
    )


def _way_out(request: Request, judged: Sequence[Judged]) -> str:
    """Return the remedy that admits the only backend, or else the requirement that none meets."""
    (first, *others) = judged
    if others or first.refusal is None or first.refusal.kind in ("capability", "automatic"):
        return _concession(request, judged)
    return f"{first.refusal.remedy}, or "


def _who_is_able(judged: Sequence[Judged], environment: Surroundings) -> str:
    """Return the remedy that uses or adds a plugin with the requested quantisation and method."""
    here = {each.found.id: each for each in judged}
    for name in environment.able:
        if name not in here:
            return f"{_install(name, environment)}, which has it; or "
        refusal = here[name].refusal
        if refusal and refusal.kind == "explicit":
            return f"choose --backend {name}, which has it; or "
        if refusal and refusal.kind == "blocked":
            return f"{refusal.remedy}, or "
    return ""


def _concession(request: Request, judged: Sequence[Judged]) -> str:
    """Return the one setting to change so that a backend's capabilities suffice."""
    manifests = [
        each.found.manifest for each in judged if each.refusal and each.refusal.kind == "capability"
    ]
    for flag, given_in in _CONCESSIONS:
        if any(m and not lacking(given_in(request), m.capabilities) for m in manifests):
            return f"run with `{flag}`, or "
    return ""


def _not_installed(
    request: Request, judged: Sequence[Judged], environment: Surroundings
) -> BackendError:
    name, installed = str(request.explicit), [each.found.id for each in judged]
    near = nearest(name, sorted({*installed, *environment.known}))
    meant = f"{near!r}, if you meant that" if near else "one that is installed"
    known = name in environment.known
    return BackendError(
        "B003",
        f"backend {name!r} is not installed",
        where=request.asked,
        found=f"installed: {', '.join(installed) or 'none'}",
        remedy=_install(name, environment)
        if known
        else f"ask for {meant}, or leave the choice to vox",
    )


def _tie(one: Judged, other: Judged) -> BackendError:
    rows = [f"{each.found.id} (distribution {each.found.distribution})" for each in (one, other)]
    return BackendError(
        "B005",
        f"two backends tie: {rows[0]} and {rows[1]}",
        found=f"both with priority {one.rank[2]}, and nothing else to tell them apart",
        remedy=f"choose one, for example: --backend {one.found.id}",
    )


def _install(backend: str, environment: Surroundings) -> str:
    """Return the install command for an id in the catalog; package names are never guessed."""
    if backend in environment.known:
        return f"install {backend!r}: vox plugin install {backend}"
    return "install a backend for this machine"


class Seen:
    """The plugins, machine and probe results as of their first use."""

    def __init__(self) -> None:
        self._hardware: dict[str, probe.Hardware | probe.ProbeFault] = {}

    @cached_property
    def plugins(self) -> tuple[Found, ...]:
        """Installed plugins of every kind."""
        return discover.discover()

    @cached_property
    def blocked(self) -> dict[str, str]:
        """Id of a blocked plugin -> the place that blocks it."""
        return blocked_plugins([plugin.id for plugin in self.plugins])

    @cached_property
    def _accelerators(self) -> tuple[probe.Accelerator, ...]:
        return probe.accelerators()

    def select(self, request: Request) -> Selection:
        """Return the selection that `choose` makes, loading no plugin; errors as there."""
        return select(request, *self.survey(request, known().plugins))

    def verdicts(self, request: Request) -> tuple[Verdict, ...]:
        """Return the verdict on each installed backend, sorted by id, without choosing one."""
        return tuple(each.verdict for each in judge_all(request, *self.survey(request)))

    def survey(
        self, request: Request, known: Collection[str] = ()
    ) -> tuple[list[Candidate], Surroundings]:
        """Return the installed backends, probed as far as `request` needs it, and the other inputs
        of a selection.

        Args:
            known: ids of installable plugins; empty where no advice is needed.
        """
        backends = [plugin for plugin in self.plugins if _is_candidate(plugin, request)]
        environment = Surroundings(
            accelerators=self._accelerators,
            machine=this_machine(),
            blocked=self.blocked,
            known=known,
            able=_able(request, self._accelerators) if known else (),
        )
        asked = [each for each in backends if not static_refusal(request, each, environment)]
        unasked = [plugin for plugin in asked if plugin.id not in self._hardware]
        self._hardware |= probe.probe_all(unasked)
        hardware = {plugin.id: self._hardware[plugin.id] for plugin in asked}
        return [Candidate(plugin, hardware.get(plugin.id)) for plugin in backends], environment


def _able(request: Request, present: tuple[probe.Accelerator, ...]) -> tuple[str, ...]:
    quantised = request.quant not in (None, "none")
    if not quantised and request.method != "full":  # every backend has the rest
        return ()
    tags = {each.tag for each in present}
    return tuple(
        entry.id
        for entry in known().plugins.values()
        if (not quantised or request.quant in entry.quantisations)
        and (request.method is None or request.method in entry.methods)
        and not objections(entry, tags)
    )


def _is_candidate(plugin: Found, request: Request) -> bool:
    """Whether a plugin may be a backend, as one with a faulty manifest, or was named as one."""
    manifest = plugin.manifest
    return manifest is None or manifest.is_backend or plugin.id == request.explicit


def choose(request: Request, seen: Seen | None = None) -> tuple[Backend, Selection]:
    """Select a backend for `request` and load it.

    Args:
        seen: facts cached for another request of the same command.

    Raises:
        BackendError: none can be chosen, or the one chosen cannot be loaded.
        ConfigError: an environment variable about plugins or hardware is wrong.
    """
    seen = seen or Seen()
    selection = seen.select(request)
    found = next(each for each in seen.plugins if each.id == selection.chosen)
    return load_backend(found, request.operation), selection

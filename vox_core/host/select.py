"""Choose the backend for a request, and explain why the others were refused.

A pure function of the request, the installed plugins with what their probes found, and the machine:
no order of discovery, clock or environment variable changes its answer.

1. A backend chosen by name is used, or it is an error; there is no fallback.
2. Filters that need no hardware: blocked, API, platform, Python, distributions, capabilities, and
   whether the plugin allows automatic choice (`automatic`).
3. The probe results of the rest. *Not installed*, *broken* and *no such hardware* differ.
4. Rank: an accelerator with enough memory, then anything with enough memory; then the backend that
   the run being resumed was on; then the priority that plugins declare. A tie is an error.
5. Training does not choose the CPU by itself if there is an accelerator whose backend is missing,
   broken or without its driver (idle.py).

The filters are in judge.py. Nothing here runs a probe (probe.py) or imports a plugin (load.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace

from vox_core.errors import BackendError
from vox_core.host import (
    TELLS_MORE,
    Candidate,
    Environment,
    Request,
    Selection,
    Verdict,
    remedies,
)
from vox_core.host.discover import Found
from vox_core.host.idle import Idle, idle_accelerator
from vox_core.host.judge import Judged, how_asked, judge_all, lacking, static_refusal


def select(
    request: Request, candidates: Sequence[Candidate], environment: Environment
) -> Selection:
    """Choose a backend for a request.

    Args:
        candidates: probed as far as `needs_probe` says.

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
    idle = None if ranked[0].accelerates else idle_accelerator(judged, environment)
    if idle and idle.asks and request.operation == "train" and not request.allow_cpu:
        raise _would_lie_idle(idle)
    why = _why(ranked, request) + (f"; {idle.what}" if idle else "")
    return _selection(ranked[0], why, judged)


def verdicts(
    request: Request, candidates: Sequence[Candidate], environment: Environment
) -> tuple[Verdict, ...]:
    """Return the verdict on each candidate, sorted by id, without choosing one."""
    return tuple(judged.verdict for judged in judge_all(request, candidates, environment))


def needs_probe(request: Request, plugin: Found, environment: Environment) -> bool:
    """Whether the choice of a candidate now depends on its hardware alone."""
    return static_refusal(request, plugin, environment) is None


# --- among several --------------------------------------------------------------------------------


def _explicit(request: Request, judged: Sequence[Judged], environment: Environment) -> Selection:
    chosen = next((each for each in judged if each.found.id == request.explicit), None)
    if chosen is None:
        raise _not_installed(request, judged, environment)
    if chosen.verdict.status == "broken":
        raise _broken(chosen, environment) from chosen.found.fault
    if chosen.refusal:
        raise _none_usable(request, [chosen], environment)
    return _selection(chosen, f"asked for ({how_asked(request)})", judged)


def _selection(chosen: Judged, why: str, judged: Sequence[Judged]) -> Selection:
    verdict = chosen.verdict
    why = f"backend {verdict.id} {verdict.version}, {why}: {chosen.hardware.detail}"
    told = (
        replace(each.verdict, status="chosen", reason=why) if each is chosen else each.verdict
        for each in judged
    )
    return Selection(verdict.id, why, chosen.hardware, tuple(told))


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
    return f"priority {priority}, before {second} with {next_priority}"


# --- words ----------------------------------------------------------------------------------------


def _none_installed(environment: Environment) -> BackendError:
    fitting = [each.backend for each in environment.accelerators]
    example = next((name for name in [*fitting, "cpu"] if name in environment.known), None)
    return BackendError(
        "B001",
        "no backend is installed",
        found="no installed plugin has [capabilities]",
        remedy=_install(example, environment),
    )


def _none_usable(
    request: Request, judged: Sequence[Judged], environment: Environment
) -> BackendError:
    """Return the error with a table of every candidate and its reason."""
    told = [each.verdict for each in judged]
    id_width, version_width = (max(map(len, column)) for column in _columns(told))
    who = "no usable backend" if request.explicit is None else f"{request.explicit!r} is unusable"
    return BackendError(
        "B002",
        f"{who} for `{request.operation}`{_wishes(request)}",
        faults=[
            f"{v.id:<{id_width}}  {v.version:<{version_width}}  {v.status:<8}  {v.reason}"
            for v in told
        ],
        remedy=f"{_way_out(request, judged, environment)}{TELLS_MORE}",
    )


def _columns(told: Sequence[Verdict]) -> tuple[list[str], list[str]]:
    return [verdict.id for verdict in told], [verdict.version for verdict in told]


def _wishes(request: Request) -> str:
    wishes = {
        "quantisation": None if request.quant == "none" else request.quant,
        "dtype": request.dtype,
        "method": None if request.method == "lora" else request.method,
    }
    told = [f"{what} {value}" for what, value in wishes.items() if value is not None]
    return f" with {', '.join(told)}" if told else ""


def _way_out(request: Request, judged: Sequence[Judged], environment: Environment) -> str:
    """Return the remedy that admits the named backend, or else the requirement that no backend
    meets."""
    (first, *others) = judged
    if elsewhere := _who_quantises(judged, environment):
        return elsewhere
    if others or first.refusal is None or first.refusal.kind in ("capability", "automatic"):
        return _concession(request, judged)
    return f"{_repair(first, environment)}, or "


def _who_quantises(judged: Sequence[Judged], environment: Environment) -> str:
    """Return the remedy that adds a plugin with the requested quantisation."""
    here = {each.found.id: each for each in judged}
    for name in environment.quantising:
        if name not in here:
            return f"{_install(name, environment)}, which has it; or "
        refusal = here[name].refusal
        if refusal and refusal.kind == "blocked":
            return f"{_repair(here[name], environment)}, or "
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


_CONCESSIONS: tuple[tuple[str, Callable[[Request], Request]], ...] = (
    ("--quant none", lambda request: replace(request, quant="none")),
    ("--dtype auto", lambda request: replace(request, dtype=None)),
    ("--method lora", lambda request: replace(request, method="lora")),
)


def _not_installed(
    request: Request, judged: Sequence[Judged], environment: Environment
) -> BackendError:
    name, installed = str(request.explicit), [each.found.id for each in judged]
    near = difflib.get_close_matches(name, sorted({*installed, *environment.known}), n=1)
    remedy = _install(name, environment)
    if name not in environment.known:
        meant = f"{near[0]!r}, if you meant that" if near else "one that is installed"
        remedy = f"ask for {meant}, or leave the choice to vox"
    return BackendError(
        "B003",
        f"backend {name!r} is not installed",
        where=how_asked(request),
        found=f"installed: {', '.join(installed) or 'none'}",
        remedy=remedy,
    )


def _broken(judged: Judged, environment: Environment) -> BackendError:
    verdict = judged.verdict
    return BackendError(
        "B004",
        f"backend {verdict.id!r} is installed but broken",
        where=f"{verdict.distribution} {judged.found.version}",
        found=verdict.reason,
        remedy=_repair(judged, environment),
    )


def _tie(one: Judged, other: Judged) -> BackendError:
    rows = [f"{each.found.id} (distribution {each.found.distribution})" for each in (one, other)]
    return BackendError(
        "B005",
        f"two backends tie: {rows[0]} and {rows[1]}",
        found=f"both with priority {one.rank[2]}, and nothing else to tell them apart",
        remedy=f"choose one, for example: --backend {one.found.id}",
    )


def _would_lie_idle(idle: Idle) -> BackendError:
    return BackendError(
        "B007",
        "training would run on the CPU while an accelerator lies idle",
        found=idle.what,
        remedy=f"{idle.remedy}; or train on the CPU with --allow-cpu",
    )


def _repair(judged: Judged, environment: Environment) -> str:
    assert judged.refusal is not None, judged.found.id
    who = environment.blocked.get(judged.found.id, "")
    return remedies.repair(judged.found, judged.refusal.kind, judged.refusal.reason, who)


def _install(backend: str | None, environment: Environment) -> str:
    """Return the install command for an id in the catalog; package names are never guessed."""
    if backend is not None and backend in environment.known:
        return f"install {backend!r}: vox plugin install {backend}"
    return "install a backend for this machine"

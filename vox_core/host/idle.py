"""Detect an accelerator that a choice would leave idle, and decide whether training asks first.

    its backend is                                                   training
    not installed, and the catalog has it                            asks
    broken, or written for another API, system or Python             asks
    without hardware, by its own probe: the driver is at fault       asks
    disabled or blocked: the user's own will                         goes on, and says so
    not capable of what the contract asks for                        goes on, and says so
    not installed, and nobody offers it                              goes on, and says so

probe.py detects the accelerators. `idle_accelerator` is a pure function.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vox_core.host import Environment, remedies
from vox_core.host.blocked import blocking
from vox_core.host.judge import ABSENT, Judged
from vox_core.host.probe import Accelerator

_GOES_ON = ("blocked", "capability")


@dataclass(frozen=True, slots=True)
class Idle:
    """An accelerator that no backend drives, and the installed one that should, if there is one.

    Args:
        what: the accelerator and the state of its backend, in words.
        asks: training asks first, because the accelerator could be used.
    """

    accelerator: Accelerator
    driver: Judged | None
    what: str
    asks: bool

    @property
    def remedy(self) -> str:
        """The command or step that would put the accelerator to use."""
        if self.driver is None:
            backend = self.accelerator.backend
            return f"install {backend!r}: vox plugin install {backend}"
        if _fails_on_hardware(self.driver):
            return remedies.hardware(self.accelerator.tag)
        assert self.driver.refusal is not None
        return remedies.repair(
            self.driver.found, self.driver.refusal.kind, self.driver.refusal.reason
        )


def idle_accelerator(judged: Sequence[Judged], environment: Environment) -> Idle | None:
    """Return the first idle accelerator that training asks about, else the first idle one, else
    None."""
    idle = [
        found
        for accelerator in environment.accelerators
        if (found := _idle(accelerator, judged, environment))
    ]
    return next((each for each in idle if each.asks), next(iter(idle), None))


def _idle(
    accelerator: Accelerator, judged: Sequence[Judged], environment: Environment
) -> Idle | None:
    drivers = [each for each in judged if _may_drive(each, accelerator)]
    if any(each.accelerates for each in drivers):
        return None
    if not drivers:
        return _without_backend(accelerator, environment)
    asking = [each for each in drivers if each.refusal is None or each.refusal.kind not in _GOES_ON]
    driver = (asking or drivers)[0]
    return Idle(
        accelerator, driver, f"{accelerator.name} is here, but {_state(driver)}", bool(asking)
    )


def _without_backend(accelerator: Accelerator, environment: Environment) -> Idle:
    backend = accelerator.backend
    what = f"{accelerator.name} is here, but its backend {backend!r} is not installed"
    if backend not in {*environment.known, *environment.blocked}:
        what = f"{accelerator.name} is here and stays idle: vox knows no plugin for it to install"
    if who := environment.blocked.get(backend):
        return Idle(accelerator, None, f"{what} ({blocking(backend, who)})", asks=False)
    return Idle(accelerator, None, what, asks=backend in environment.known)


def _state(driver: Judged) -> str:
    verdict = driver.verdict
    if _fails_on_hardware(driver):
        return f"its backend {verdict.id!r} cannot use it ({verdict.reason.removeprefix(ABSENT)})"
    return f"its backend {verdict.id!r} is {verdict.status} ({verdict.reason})"


def _fails_on_hardware(driver: Judged) -> bool:
    """Whether the backend's probe found at most a CPU although the core detects the accelerator."""
    return driver.refusal is None or driver.refusal.kind == "hardware"


def _may_drive(judged: Judged, accelerator: Accelerator) -> bool:
    """Whether the backend may drive the accelerator; one chosen only by name may not."""
    manifest = judged.found.manifest
    if manifest is not None and not manifest.automatic:
        return False
    tagged = manifest is not None and manifest.requires.hardware_tag == accelerator.tag
    return tagged or judged.found.id == accelerator.backend

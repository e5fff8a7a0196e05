"""What Locust's options ask for: which scenario, by which limits it is judged, and whose share of it is whose. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.config import SloConfig
from cluster.errors import ConfigError
from cluster.messages import Slo
from loadtests import scenario as scenarios
from loadtests.scenario import Scenario

DRAIN_S = 10.0


def scenario_of(options: Any) -> Scenario | None:
    """The scenario of `--pd-scenario`; None where there is none.

    Raises:
        ConfigError: there is no such scenario, it is a closed loop or limits requests in flight, or no header can carry
            a tenant of it.
    """
    name = options.pd_scenario
    if not name:
        return None
    try:
        path = scenarios.find(name)
    except ConfigError as e:
        raise ConfigError("--pd-scenario", e.problem, e.remedy) from None
    found = scenarios.load(path)
    if found.workload.closed:
        problem = f"{name!r} is a closed loop, which has no schedule to play"
        raise ConfigError("--pd-scenario", problem, "use `pdserve loadtest`, or users with --pd-loop closed")
    if found.client.max_in_flight is not None:
        problem = f"{name!r} limits its requests in flight (client.max_in_flight), which Locust's users do not"
        raise ConfigError("--pd-scenario", problem, "use `pdserve loadtest`")
    scenarios.check_tenants(found)
    return found


def slo_of(options: Any, scenario: Scenario | None) -> Slo:
    """The limits that requests are judged by. Raises ConfigError where one is not above 0."""
    base = scenario.slo if scenario is not None else SloConfig()
    changes: dict[str, float] = {}
    for option, key in (("pd_ttft_ms", "ttft_ms"), ("pd_tpot_ms", "tpot_ms")):
        value = getattr(options, option)
        if value is None or value == "":
            continue
        changes[key] = _above_zero(f"--{option.replace('_', '-')}", value)
    return base.model_copy(update=changes).to_slo()


def drain_of(options: Any, scenario: Scenario | None) -> float:
    """Seconds to wait for what runs at the end: `--pd-drain`, or the scenario's. Raises ConfigError below 0."""
    if options.pd_drain in (None, ""):
        return DRAIN_S if scenario is None else scenario.client.drain_s
    try:
        seconds = float(options.pd_drain)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ConfigError("--pd-drain", f"{options.pd_drain!r} is no number of seconds", "give 0 or more")
    return seconds


def _above_zero(option: str, value: Any) -> float:
    # A web UI gives text.
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise ConfigError(option, f"{value!r} is no number above 0", "give milliseconds")
    return number


def shares(workers: Sequence[str]) -> dict[str, int]:
    """Which of `len(workers)` equal shares of a schedule each worker plays, by its name."""
    return {worker: number for number, worker in enumerate(workers)}


def share_of(all_shares: Mapping[str, int] | None, worker: str | None) -> tuple[int, int] | None:
    """(share, number of shares) of one worker; None for a worker that came after they were dealt out, and plays none.

    Args:
        all_shares: None where there is one process, which plays everything.
    """
    if all_shares is None:
        return 0, 1
    share = all_shares.get(worker or "")
    return None if share is None else (share, len(all_shares))

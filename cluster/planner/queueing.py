"""How long requests wait, in closed form: what turns service times into attainment of an SLO."""

from __future__ import annotations

import math


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c with `load` = rate * service time (Erlang, 1917).

    Computed by the recursion of Erlang's B formula, which does not overflow. 1 where the load fills the servers.
    """
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    rho = load / servers
    return blocked / (1 - rho + rho * blocked)


def wait_tail(t_s: float, servers: int, rate: float, service_s: float) -> float:
    """P(wait > t) before one of `servers` equal servers with a constant service time.

    The waiting probability is M/M/c's; the tail decays with the conditional mean wait of M/D/c, half that of M/M/c
    (Cosmetatos, 1975; exact for M/D/1's mean). The router sends a request where it is expected to start first,
    which is a common queue.
    """
    load = rate * service_s
    if load >= servers:
        return 1.0
    waits = erlang_c(servers, load)
    if t_s < 0:
        return 1.0
    mean_wait_s = service_s / (2 * (servers - load))
    return waits * math.exp(-t_s / mean_wait_s)


def mean_wait(servers: int, rate: float, service_s: float) -> float:
    """Mean wait of M/D/c, as half of M/M/c's; infinite at or above saturation."""
    load = rate * service_s
    if load >= servers:
        return math.inf
    return erlang_c(servers, load) * service_s / (2 * (servers - load))


def normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def poisson_at_most(n: float, mean: float) -> float:
    """P(N <= n) of a Poisson variable, by the normal approximation with continuity correction."""
    if mean <= 0:
        return 1.0
    return normal_cdf((math.floor(n) + 0.5 - mean) / math.sqrt(mean))

"""How much one replica can take within the SLO, learnt from what the engines count.

Busy time of a pool is a sum of three costs: every step, every sequence in a step, every computed prompt token

    busy_s = step_s * steps + per_sequence_s * sequence_steps + per_prompt_token_s * prompt_tokens

and the three are fitted by least squares with forgetting, around a prior. The cost of one step of a batch of b
sequences is then known beyond the batches seen so far, which is what a capacity "within the SLO" needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cluster.autoscaling.messages import PoolLoad, StepCost

FORGET_S = 900.0
PRIOR_WEIGHT_S = 2.0
MOST_BUSY = 0.95


@dataclass(frozen=True, slots=True)
class CostModel:
    """Fit of one pool's `StepCost`. `unit` scales the three unknowns to about 1; `seen` is the decayed evidence."""

    unit: StepCost | None = None
    gram: tuple[float, ...] = (0.0,) * 9
    moment: tuple[float, ...] = (0.0,) * 3

    @classmethod
    def of(cls, prior: StepCost | None) -> CostModel:
        return cls(unit=prior)

    def learn(self, before: PoolLoad, after: PoolLoad, elapsed_s: float) -> CostModel:
        """Take in the difference of two observations. Unknown or idle intervals teach nothing."""
        deltas = _deltas(before, after)
        if deltas is None:
            return self
        busy_s, steps, sequences, tokens = deltas
        if busy_s <= 0 or steps <= 0:
            return self
        unit = self.unit or _guess(busy_s, steps, sequences, tokens)
        row = np.array([unit.step_s * steps, unit.per_sequence_s * sequences, unit.per_prompt_token_s * tokens])
        row = row / busy_s
        weight = min(busy_s, 30.0)
        keep = math.exp(-elapsed_s / FORGET_S)
        gram = np.array(self.gram).reshape(3, 3) * keep + weight * np.outer(row, row)
        moment = np.array(self.moment) * keep + weight * row
        return CostModel(unit, tuple(gram.ravel().tolist()), tuple(moment.tolist()))

    def cost(self) -> StepCost | None:
        """The fitted costs; None before anything is known."""
        if self.unit is None:
            return None
        gram = np.array(self.gram).reshape(3, 3) + PRIOR_WEIGHT_S * np.eye(3)
        moment = np.array(self.moment) + PRIOR_WEIGHT_S
        free = [0, 1, 2]
        scale = np.zeros(3)
        while free:
            scale[:] = 0.0
            scale[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            negative = [i for i in free if scale[i] < 0]
            if not negative:
                break
            free = [i for i in free if i not in negative]
        return StepCost(
            self.unit.step_s * float(scale[0]),
            self.unit.per_sequence_s * float(scale[1]),
            self.unit.per_prompt_token_s * float(scale[2]),
        )


def _deltas(before: PoolLoad, after: PoolLoad) -> tuple[float, float, float, float] | None:
    pairs = (
        (before.busy_s, after.busy_s),
        (before.steps, after.steps),
        (before.sequence_steps, after.sequence_steps),
        (before.prompt_tokens, after.prompt_tokens),
    )
    out = []
    for was, now in pairs:
        if was is None or now is None or now < was:
            return None
        out.append(now - was)
    return out[0], out[1], out[2], out[3]


def _guess(busy_s: float, steps: float, sequences: float, tokens: float) -> StepCost:
    """First belief without a prior: a step costs mostly itself; a prompt token what is left if there are many."""
    mean_s = busy_s / steps
    if tokens > sequences:
        return StepCost(0.1 * mean_s, 0.01 * mean_s, 0.9 * busy_s / tokens)
    return StepCost(0.9 * mean_s, 0.1 * mean_s / max(1.0, sequences / steps), mean_s / 200)


def decode_replicas(
    cost: StepCost,
    tokens_per_s: float,
    prompt_tokens_per_s: float,
    tpot_s: float,
    max_num_seqs: int | None,
    spread: float,
) -> float:
    """Replicas at which the mean TPOT is `tpot_s`, as a fraction of replicas.

    With g output tokens and p prompt tokens per second and replica, a step of b = g * TPOT sequences lasts
    step_s + per_sequence_s * b, and prompts take the share per_prompt_token_s * p of all time, so

        TPOT = step_s / (1 - per_sequence_s * g - per_prompt_token_s * p)

    which is solved for the number of replicas that share the load. `inf` where one step alone is too long.

    Args:
        spread: room for the number of sequences being above its mean, in standard deviations of a Poisson number.
    """
    load = cost.per_sequence_s * tokens_per_s + cost.per_prompt_token_s * prompt_tokens_per_s
    if cost.step_s >= tpot_s:
        return math.inf
    replicas = load / (1 - cost.step_s / tpot_s)
    concurrent = tokens_per_s * tpot_s
    if max_num_seqs:
        replicas = max(replicas, concurrent / max_num_seqs)
    return replicas * (1 + spread / math.sqrt(max(1.0, concurrent)))


def decode_batch(cost: StepCost, tpot_s: float, prompt_share: float, max_num_seqs: int | None) -> float:
    """Sequences that one replica may run while its steps, prompts included, stay within `tpot_s`."""
    bound = math.inf if max_num_seqs is None else float(max_num_seqs)
    room_s = tpot_s * (1 - min(0.9, prompt_share)) - cost.step_s
    if cost.per_sequence_s <= 0:
        return bound
    return max(1.0, min(bound, room_s / cost.per_sequence_s))


def servers_for_wait(
    load: float, service_s: float, variability: float, wait_s: float, late: float, *, late_last: bool = False
) -> float:
    """Servers (a real number) of a queue in which at most the share `late` of the requests is late.

    M/G/c by Sakasegawa's and Allen-Cunneen's approximations: P(wait) = rho^(sqrt(2(c+1)) - 1), and the waits of
    those who wait are exponential with mean variability * service_s / (c (1 - rho)). In order of arrival the late are
    those that wait longer than `wait_s`. Large pools may run fuller than small ones; that is why this is no fixed
    utilisation.

    Args:
        load: busy servers on average, i.e. arrivals per second times `service_s`.
        variability: (ca^2 + cs^2) / 2 of arrivals and service times; 1 for exponential ones.
        late_last: who would be late goes behind the others, as if it had left the queue: with W = P(wait > wait_s) the
            share (1 - rho) W / (1 - rho W) is late (Boots and Tijms, 1999). Then at most `MOST_BUSY` of every server
            is used, unless more would do in order of arrival too: the late ones must be served some time.
    """
    if load <= 0 or service_s <= 0:
        return 0.0

    def late_share(servers: float) -> float:
        rho = load / servers
        if rho >= 1:
            return 1.0
        mean_s = variability * service_s / (servers * (1 - rho))
        waits = float(rho ** (math.sqrt(2 * (servers + 1)) - 1) * math.exp(-max(0.0, wait_s) / mean_s))
        return (1 - rho) * waits / (1 - rho * waits) if late_last else waits

    low = load
    if late_last:
        low = min(load / MOST_BUSY, servers_for_wait(load, service_s, variability, wait_s, late))
        if late_share(low) <= late:
            return low
    high = low + 1.0
    while late_share(high) > late:
        low, high = high, high * 1.5 + 1
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if late_share(middle) > late else (low, middle)
    return high

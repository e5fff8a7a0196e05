"""How many replicas each pool needs, as a real number with its reason: the largest of several needs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cluster.autoscaling.capacity import decode_batch, decode_replicas, servers_for_wait
from cluster.autoscaling.demand import Demand
from cluster.autoscaling.messages import PoolLoad, PoolSettings, Settings, StepCost

# A need this little above the target is no reason to grow: it is within what the estimate is worth. Where arrivals are
# few, the estimate is worth less, and the margin is the standard deviation of their rate.
UP_MARGIN = 1.05
# Share of the TPOT limit that the mean of all requests may use, so that a request above the mean still fits.
TPOT_AIM = 0.9
# Share of a replica's KV blocks that may be used before tokens to come find no room.
KV_AIM = 0.9
# Room for the work of the running sequences above its mean, in standard deviations.
SPREAD = 1.0
# Sequences that piled up say less about the need than what arrives: at most this many times that.
PILE_UP = 1.5
# Standard deviations of a number of sequences that are chance.
SURPRISE = 3.0
# Below this utilisation a backlog clears by itself: no reason for another replica.
CLEARS = 0.8
# Utilisation where waiting cannot be bounded because serving alone uses up the limit.
PLAIN_UTILISATION = 0.8


@dataclass(frozen=True, slots=True)
class Need:
    """Replicas (a real number), why, and whether a delay would cost requests."""

    replicas: float
    reason: str
    why: str
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Queue:
    """The part of the routers' queue that one pool is answerable for.

    Attributes:
        shrinks: it is shorter than a while ago.
        settled: replicas came or left long enough ago that the queue shows it.
    """

    depth: float = 0.0
    oldest_wait_s: float = 0.0
    shrinks: bool = False
    settled: bool = True


def prefill_need(
    settings: Settings, demand: Demand, load: PoolLoad, cost: StepCost | None, queue: Queue, startup_s: float
) -> Need:
    """Replicas of the prefill pool: a queue in which few wait so long that TTFT is missed, and its backlog."""
    limit_s = settings.slo.ttft_s
    per_token_s = seconds_per_prompt_token(cost, demand.leg_tokens)
    if per_token_s is None:
        return _blind(load, queue, limit_s)
    service_s = per_token_s * demand.leg_tokens
    busy = per_token_s * demand.prefill_tokens_per_s

    def steady(load: float) -> float:
        if service_s >= limit_s:
            return load / PLAIN_UTILISATION
        # The rest of the misses is for decode, and for arrivals that are less even than the formula believes.
        late = (1 - settings.attainment) / (4 if settings.late_last else 2)
        variability = (demand.dispersion + demand.leg_cv2) / 2
        return servers_for_wait(load, service_s, variability, limit_s - service_s, late, late_last=settings.late_last)

    why = f"{demand.prefill_tokens_per_s:.0f} uncached prompt tokens/s, {1 / per_token_s:.0f}/s a replica"
    need = Need(steady(busy), "demand", why)
    waiting_s = per_token_s * ((load.queued_prompt_tokens or 0.0) + queue.depth * demand.leg_tokens)
    spare = load.ready + load.starting - busy
    # Gone before another replica could come?
    clears = spare > 0 and waiting_s / spare <= startup_s
    # A backlog below what the pool clears within the limit is no backlog.
    if waiting_s > limit_s * max(1, load.ready):
        # What is short now stays short for a start-up time: rather a replica too many than one too few.
        most = busy * (1 + demand.uncertainty)
        drain = _to_drain(settings, load, busy, waiting_s, startup_s)
        wanted = min(drain, float(load.ready + load.starting)) if clears else max(drain, steady(most))
        if wanted > need.replicas or not clears:
            need = Need(wanted, "queue", f"{waiting_s:.1f} s of prefill work waits", urgent=True)
    # Where late requests go last, a long wait says nothing as long as it is being worked off.
    patient = busy < CLEARS * load.ready or (settings.late_last and spare > 0 and queue.shrinks)
    return need if patient else _impatient(need, load, queue, limit_s)


def _to_drain(settings: Settings, load: PoolLoad, busy: float, waiting_s: float, startup_s: float) -> float:
    """Replicas that keep up with what comes and clear the backlog within half a look-back."""
    within_s = settings.look_back_s / 2
    if settings.late_last:
        # Late requests wait until there is room; only those that came within the limit can still be good.
        return busy + min(waiting_s, busy * settings.slo.ttft_s) / within_s
    # While too little is under way, the backlog grows for as long as a replica takes to start.
    short = load.ready + load.starting <= busy
    by_then_s = waiting_s + max(0.0, busy - load.ready) * startup_s if short else waiting_s
    return busy + by_then_s / within_s


def decode_need(
    settings: Settings, demand: Demand, load: PoolLoad, cost: StepCost | None, queue: Queue, growth: float
) -> Need:
    """Replicas of the decode pool (of the only pool where colocated): tokens/s, sequences and KV blocks.

    Args:
        growth: factor by which the running sequences are expected to grow while a replica starts.
    """
    limit_s, pool = settings.slo.tpot_s, settings.decode
    aim_s = TPOT_AIM * limit_s
    need = Need(0.0, "demand", "no arrivals")
    sequences = (load.running or 0.0) + (load.waiting or 0.0)
    if cost is not None:
        if demand.output_tokens_per_s is not None:
            need = _rate_need(pool, demand, demand.output_tokens_per_s, cost, aim_s)
        prompt_share = cost.per_prompt_token_s * demand.decode_prompt_tokens_per_s / max(1, load.ready)
        batch = decode_batch(cost, aim_s, prompt_share, pool.max_num_seqs)
        # Where late requests go last, only those in time come all at once.
        in_front = min(queue.depth, demand.arrivals_per_s * settings.slo.ttft_s) if settings.late_last else queue.depth
        # As many as the rate of tokens explains will not grow: those that come replace those that end. More of them
        # are the first sign of longer outputs, which show in the rate only when they end.
        explained = (demand.output_tokens_per_s or 0.0) * aim_s
        if sequences <= explained + SURPRISE * math.sqrt(demand.dispersion * explained):
            growth = 1.0
        expected = sequences * growth + in_front
        crowd = expected / batch
        if demand.output_tokens_per_s:
            crowd = min(crowd, PILE_UP * need.replicas + 1)
        if crowd > need.replicas and expected > 1:
            need = Need(
                crowd,
                "concurrency",
                f"{expected:.0f} sequences, {batch:.0f} a replica within TPOT",
                urgent=(load.waiting or 0.0) + queue.depth > batch / 4,
            )
    if load.kv_used_ratio is not None and load.ready and load.kv_used_ratio > 0.5:
        claims = 1 + ((load.waiting or 0.0) + queue.depth) / max(1.0, load.running or 0.0)
        kv = load.ready * load.kv_used_ratio * min(claims, 2.0) / KV_AIM
        if kv > need.replicas:
            need = Need(kv, "kv", f"KV {load.kv_used_ratio:.0%} full", urgent=load.kv_used_ratio >= 0.95)
    if cost is None and need.replicas == 0:
        return _blind(load, queue, settings.slo.ttft_s)
    patient = cost is not None and need.replicas < CLEARS * load.ready
    patient = patient or (settings.late_last and queue.shrinks and need.replicas <= load.ready)
    return need if patient else _impatient(need, load, queue, settings.slo.ttft_s)


def seconds_per_prompt_token(cost: StepCost | None, leg_tokens: float) -> float | None:
    """Busy time of a prefill engine per prompt token; a short prompt also pays for its step."""
    if cost is None:
        return None
    return cost.per_prompt_token_s + cost.step_s / max(1.0, leg_tokens)


def _rate_need(pool: PoolSettings, demand: Demand, tokens_per_s: float, cost: StepCost, aim_s: float) -> Need:
    spread = SPREAD * math.sqrt(demand.dispersion + min(demand.leg_cv2, 4.0))
    rate = decode_replicas(cost, tokens_per_s, demand.decode_prompt_tokens_per_s, aim_s, pool.max_num_seqs, spread)
    if not math.isfinite(rate):
        # One sequence alone misses TPOT: no number of replicas helps, so share the work and nothing more.
        busy = cost.per_sequence_s * tokens_per_s + cost.per_prompt_token_s * demand.decode_prompt_tokens_per_s
        rate = busy / PLAIN_UTILISATION
    return Need(rate, "demand", f"{tokens_per_s:.0f} output tokens/s")


def _blind(load: PoolLoad, queue: Queue, limit_s: float) -> Need:
    """Without a measured capacity: what is there, and one more while requests wait."""
    there = float(load.ready + load.starting)
    busy = (load.running or 0.0) + (load.waiting or 0.0) + queue.depth > 0
    return _impatient(Need(there if busy else 0.0, "demand", "capacity not measured yet"), load, queue, limit_s)


def _impatient(need: Need, load: PoolLoad, queue: Queue, limit_s: float) -> Need:
    """Arrivals that throttle themselves (closed loop) hide the demand; the wait in front of the door does not."""
    there = load.ready + load.starting
    if queue.oldest_wait_s > limit_s / 2 and queue.settled and not load.starting and need.replicas <= there * UP_MARGIN:
        return Need(there + 1.0, "queue", f"oldest request waits {queue.oldest_wait_s:.1f} s", urgent=True)
    if queue.oldest_wait_s > limit_s / 2:
        return Need(need.replicas, need.reason, need.why, urgent=True)
    return need

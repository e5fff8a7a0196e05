"""Steady-state behaviour of one pool under a Poisson load: what share of requests meets TTFT and TPOT.

Prefill pool: an M/D/c queue of prompts; TTFT = wait + prefill + KV transfer + first decode step.

Decode pool: B sequences a replica satisfy Little's law, `B = rate * output * step(B)`. B fluctuates like a Poisson
variable (M/G/inf); a request feels the mean over its stay, whose variance is 2/3 of B for a constant stay
(the integral of the triangular autocovariance), and balanced placement shares the fluctuation among replicas.

Colocated pool: a prompt takes ceil(prompt / chunk) mixed steps. With rate r and chunk time m the share of time in
mixed steps is `f = r * chunks * m`; what is left runs plain decode steps of time d, so a decoding sequence sees
`chunks * r + (1 - f) / d` steps a second, whose inverse is the TPOT. Prompts queue for mixed steps as M/D/1 at
utilisation f.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from cluster.messages import Slo
from cluster.perf.times import StepTimes
from cluster.planner.queueing import mean_wait, normal_cdf, poisson_at_most, wait_tail

PROMPT_BATCH_TOKENS = 2048
"""Short prompts are computed together up to about this many tokens: beyond it a pass is bound by arithmetic."""
STAY_VARIANCE = 2 / 3


@dataclass(frozen=True, slots=True)
class Workload:
    """Fixed lengths: the planner's analytic half knows means; the simulator sees the distribution.

    `cached_tokens` of each prompt are already in the prefix cache of the engine that prefills.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0

    @property
    def new_tokens(self) -> int:
        return max(1, self.prompt_tokens - self.cached_tokens)

    @property
    def mean_context(self) -> float:
        """KV tokens a decoding sequence holds on average."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Outlook:
    """One pool (or pair of pools) at one rate. Times are means; shares are of all requests.

    `limits` maps each resource to the share of requests that it alone lets pass; the lowest is the bottleneck.
    """

    rate: float
    ttft_s: float
    tpot_s: float
    itl_max_s: float
    batch: float
    attainment: float
    limits: dict[str, float]

    @property
    def bottleneck(self) -> str:
        return min(self.limits, key=lambda name: self.limits[name])


class PrefillCurve:
    """One replica that only prefills."""

    def __init__(self, times: StepTimes, load: Workload, pp: int = 1) -> None:
        together = max(1, PROMPT_BATCH_TOKENS // load.new_tokens)
        chunk = (load.new_tokens, load.cached_tokens)
        self.latency_s = times.step_s([chunk] * together, 0, 0)
        # A pipeline starts the next prompt before the last has left: the bubble costs latency, not rate.
        self.interval_s = self.latency_s / together / (1 + (pp - 1) / pp)


class DecodeCurve:
    """One replica that only decodes; `room` sequences fit its KV pool."""

    def __init__(self, times: StepTimes, load: Workload, room: int) -> None:
        self._times, self._load, self.room = times, load, room
        self._batches: list[float] = []
        self._rates: list[float] = []
        self._caps: dict[float, int] = {}

    def step_s(self, batch: float) -> float:
        """Seconds of a decode step at a (fractional) batch."""
        low = math.floor(batch)
        at_low = self._whole(max(1, low))
        return at_low if low < 1 else at_low + (batch - low) * (self._whole(low + 1) - at_low)

    def _whole(self, batch: int) -> float:
        return self._times.step_s((), batch, round(batch * self._load.mean_context))

    def batch(self, rate: float) -> float:
        """Mean sequences at `rate` requests a second on this replica; infinite where there is no balance."""
        if not self._rates:
            # Little's law the other way round is explicit: the rate that holds b sequences in balance.
            b = 0.0
            while b <= 4 * self.room + 64:
                self._batches.append(b)
                self._rates.append(b / (self._load.output_tokens * self.step_s(b)))
                b = b + 1 if b < 32 else math.floor(b * 1.1)
        if rate >= self._rates[-1]:
            return math.inf
        i = bisect_right(self._rates, rate)
        low, high = self._rates[i - 1], self._rates[i]
        return self._batches[i - 1] + (rate - low) / (high - low) * (self._batches[i] - self._batches[i - 1])

    def cap(self, tpot_s: float) -> int:
        """The largest batch within the TPOT, whatever the memory."""
        if tpot_s not in self._caps:
            low, high = 0, 1
            while high <= 65536 and self._whole(high) <= tpot_s:
                low, high = high, high * 2
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._whole(middle) <= tpot_s else (low, middle)
            self._caps[tpot_s] = low
        return self._caps[tpot_s]


def solve_up(f: Callable[[float], float], room: float) -> float:
    """The smallest fixed point b = f(b) of an increasing f, by iteration from below; infinite above 4 x room."""
    b = 0.0
    for _ in range(200):
        following = f(b)
        if following > 4 * room + 64:
            return math.inf
        if abs(following - b) <= 1e-6 * max(1.0, b):
            return following
        b = following
    return b


def split_outlook(
    rate: float,
    prefill: PrefillCurve,
    prefill_replicas: int,
    decode: DecodeCurve,
    decode_replicas: int,
    transfer_s: float,
    transfer_load: float,
    slo: Slo,
    itl_max_s: float | None = None,
) -> Outlook:
    """A split pair of pools.

    Args:
        rate: requests a second of the whole cluster.
        transfer_s: one prompt's KV on an idle link.
        transfer_load: seconds of link time a request takes from the pool whose adapters fill first.
        itl_max_s: longest step a decoding sequence may see; None sets no limit.
    """
    batch = decode.batch(rate / decode_replicas)
    link_use = rate * transfer_load
    if math.isinf(batch) or rate * prefill.interval_s >= prefill_replicas or link_use >= 1:
        limits = {
            "prefill compute": 1.0 if rate * prefill.interval_s < prefill_replicas else 0.0,
            "decode step": 0.0 if math.isinf(batch) else 1.0,
            "KV transfer": 1.0 if link_use < 1 else 0.0,
        }
        return Outlook(rate, math.inf, math.inf, math.inf, batch, 0.0, limits)
    step_s = decode.step_s(batch)
    # Transfers share the link: M/D/1 on its use. Decode admits between steps: half a step, then one.
    moved_s = transfer_s * (1 + link_use / (2 * (1 - link_use)))
    rest_s = prefill.latency_s + moved_s + 1.5 * step_s
    ttft_ok = 1 - wait_tail(slo.ttft_s - rest_s, prefill_replicas, rate, prefill.interval_s)
    spread = math.sqrt(STAY_VARIANCE * max(batch, 1e-9) / decode_replicas)
    tpot_ok = normal_cdf((decode.cap(slo.tpot_s) - batch) / spread)
    room_ok = poisson_at_most(decode.room * decode_replicas, batch * decode_replicas)
    limits = {"prefill compute": ttft_ok, "decode step": tpot_ok, "decode KV memory": room_ok}
    if rest_s > slo.ttft_s and moved_s > 0.5 * slo.ttft_s:
        limits["KV transfer"] = -1.0
    within = tpot_ok
    if itl_max_s is not None:
        # A batch decides the length of its step, so whoever keeps the tighter limit keeps both.
        longest_ok = normal_cdf((decode.cap(itl_max_s) - batch) / spread) if step_s <= itl_max_s else -1.0
        limits["longest step"], within = longest_ok, max(0.0, min(tpot_ok, longest_ok))
    return Outlook(
        rate=rate,
        ttft_s=mean_wait(prefill_replicas, rate, prefill.interval_s) + rest_s,
        tpot_s=step_s,
        itl_max_s=step_s,
        batch=batch,
        attainment=ttft_ok * within * room_ok,
        limits=limits,
    )


class MixedCurve:
    """Equal replicas that do both phases; `chunk_tokens` None computes a prompt in one step."""

    def __init__(
        self, times: StepTimes, load: Workload, room: int, replicas: int = 1, chunk_tokens: int | None = None
    ) -> None:
        self._times, self._load, self.room, self.replicas = times, load, room, replicas
        chunk = min(chunk_tokens or load.new_tokens, load.new_tokens)
        self._chunks = math.ceil(load.new_tokens / chunk)
        self._chunk = math.ceil(load.new_tokens / self._chunks)
        self._decode = DecodeCurve(times, load, room)

    def mixed_s(self, batch: float) -> float:
        """Mean seconds of a step with one chunk and `batch` decoding sequences."""
        middle = self._load.cached_tokens + (self._load.new_tokens - self._chunk) // 2
        whole = round(batch)
        return self._times.step_s([(self._chunk, middle)], whole, round(whole * self._load.mean_context))

    def outlook(self, rate: float, slo: Slo, itl_max_s: float | None = None) -> Outlook:
        """The pool at `rate` requests a second, shared evenly by its replicas."""
        load, chunks, replicas = self._load, self._chunks, self.replicas
        own = rate / replicas

        def tpot_s(batch: float) -> float:
            mixed, plain = self.mixed_s(batch), self._decode.step_s(batch)
            busy = own * chunks * mixed
            return math.inf if busy >= 1 else 1 / (chunks * own + (1 - busy) / plain)

        batch = solve_up(lambda b: own * load.output_tokens * tpot_s(b), self.room)
        if math.isinf(batch):
            limit = "prefill compute" if own * chunks * self.mixed_s(0) >= 0.5 else "decode step"
            return Outlook(rate, math.inf, math.inf, math.inf, batch, 0.0, {limit: 0.0})
        mixed, plain, tpot = self.mixed_s(batch), self._decode.step_s(batch), tpot_s(batch)
        service_s = chunks * mixed
        rest_s = service_s + plain / 2
        ttft_ok = 1 - wait_tail(slo.ttft_s - rest_s, replicas, rate, service_s)
        # Prompts that happen to arrive during a stay, and the batch, move a request's own TPOT.
        stay_s = load.output_tokens * tpot
        stall = chunks * max(0.0, mixed - plain) / load.output_tokens
        by_batch = max(0.0, self._decode.step_s(batch + 1) - plain)
        variance = stall**2 * own * stay_s + by_batch**2 * STAY_VARIANCE * batch
        deviation = math.sqrt(variance / replicas)
        tpot_ok = normal_cdf((slo.tpot_s - tpot) / deviation) if deviation > 0 else float(tpot <= slo.tpot_s)
        limits = {
            "prefill compute": ttft_ok,
            "decode step": tpot_ok,
            "KV memory": poisson_at_most(self.room * replicas, batch * replicas),
        }
        attainment = ttft_ok * tpot_ok * limits["KV memory"]
        if itl_max_s is not None and mixed > itl_max_s:
            limits["longest step"], attainment = -1.0, 0.0
        wait_s = mean_wait(replicas, rate, service_s)
        return Outlook(rate, wait_s + rest_s, tpot, mixed, batch, attainment, limits)


def highest_rate(attainment: Callable[[float], float], target: float, start: float = 1e-3) -> float:
    """The highest rate at which `attainment`, falling in the rate, reaches `target`; 0 where even a trickle fails."""
    if attainment(start) < target:
        return 0.0
    low, high = start, 2 * start
    while attainment(high) >= target:
        low, high = high, 2 * high
        if high > 1e7:
            return low
    for _ in range(36):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if attainment(middle) >= target else (low, middle)
        if high / low < 1.002:
            break
    return low

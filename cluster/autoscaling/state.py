"""The policy's memory: a value, replaced at every decision, never changed in place."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.autoscaling.capacity import CostModel
from cluster.autoscaling.demand import History
from cluster.autoscaling.messages import Observation, Settings
from cluster.messages import Role


@dataclass(frozen=True, slots=True)
class PoolState:
    """What is remembered of one pool.

    Attributes:
        target: the last target; None before the first decision.
        needs: (time, replicas needed) as far back as the longest delay.
        costs: fit of the pool's step cost.
        factor: feedback on the need: above 1 while the pool misses its SLO although demand seemed covered.
        startup_s: measured start-up time of a replica; None before the first one.
        waiting_since_s: when the replicas that are still starting were asked for.
        running: (time, running sequences), for their growth.
    """

    target: int | None = None
    needs: tuple[tuple[float, float], ...] = ()
    costs: CostModel = field(default_factory=CostModel)
    factor: float = 1.0
    startup_s: float | None = None
    waiting_since_s: float | None = None
    running: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """The policy's whole memory.

    Attributes:
        seen: the last observation that could be used, and when.
        since_s: start of the unbroken series of usable observations.
        settled_s: when the last replica became ready or left, or the backlog of a shortage was last worked off; misses
            before that, plus a warm-up, are not judged.
        judged_s: when feedback last looked.
        queue: (time, depth) of the routers' queue over the last half look-back.
    """

    settings: Settings
    pools: dict[Role, PoolState]
    history: History = field(default_factory=History)
    seen: Observation | None = None
    seen_at_s: float = 0.0
    since_s: float | None = None
    settled_s: float | None = None
    judged_s: float | None = None
    queue: tuple[tuple[float, float], ...] = ()

    @property
    def queue_shrinks(self) -> bool:
        """Requests wait, and fewer than half a look-back ago."""
        return len(self.queue) >= 3 and 0 < self.queue[-1][1] < self.queue[0][1]


def initial(settings: Settings) -> State:
    """The state before the first decision."""
    pools = {role: PoolState(costs=CostModel.of(pool.prior)) for role, pool in settings.pools.items()}
    return State(settings, pools)

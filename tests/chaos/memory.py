"""`python -m tests.chaos.memory`: faults by the hundred in seconds: the real dispatcher, lifecycle, health and ledger
over pools in memory, in virtual time.

Example: python -m tests.chaos.memory --faults 500 --seed 3

Workers are killed, stopped and woken, or leave; transfers fail now and then; clients leave. Every token of every
answer is compared. Exit status 1 if a bound is missed. Processes, Ray and sockets are not in it; tests/chaos/run.py
has them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.engine.simulation.virtual_time import run_virtual
from cluster.messages import Outcome, Role

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from fake_cluster import LIMITS, Cluster
from fake_pools import FakeWorker

HANG_S = 60.0


class Hand:
    """Breaks one worker after the other, never the last healthy one of a pool."""

    def __init__(self, cluster: Cluster, gap_s: float) -> None:
        self._cluster, self._gap_s = cluster, gap_s
        self.done: list[tuple[float, str, str]] = []

    async def run(self, count: int) -> None:
        c, loop = self._cluster, asyncio.get_running_loop()
        while len(self.done) < count:
            await asyncio.sleep(c.rng.random() * 2 * self._gap_s)
            role = c.rng.choice((Role.PREFILL, Role.DECODE))
            healthy = [w for w in c.pools.workers.values() if w.info.role is role and w.alive and not w.stopped]
            if len(healthy) < 2:
                continue
            worker = c.rng.choice(sorted(healthy, key=lambda w: w.info.worker_id))
            what = c.rng.choice(("kill", "kill", "stop", "stop", "leave"))
            self.done.append((loop.time(), what, role.value))
            if what == "kill":
                worker.kill()
                loop.call_later(c.rng.random() * 2, c.pools.remove, worker)
                loop.call_later(2 + c.rng.random() * 3, self._replace, worker)
            elif what == "stop":
                worker.stopped = True
                loop.call_later(0.5 + c.rng.random() * 8, setattr, worker, "stopped", False)
            else:
                c.pools.remove(worker)
                loop.call_later(2.0, self._replace, worker)

    def _replace(self, worker: FakeWorker) -> None:
        self._cluster.pools.add(worker.info.role)


async def drive(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    limits = LIMITS.model_copy(update={"attempts": args.attempts, "migrations": args.migrations})
    c = Cluster(seed=args.seed, prefill=args.workers, decode=args.workers, limits=limits)
    c.pools.fail_transfer = 0.01
    c.pools.step_s = 0.03
    loop = asyncio.get_running_loop()
    hand = Hand(c, args.gap_s)
    breaking = loop.create_task(hand.run(args.faults))
    left: set[str] = set()

    def leave(request_id: str) -> None:
        left.add(request_id)
        c.dispatcher.client_left(request_id)

    while not breaking.done():
        streaming = c.rng.random() < 0.7
        job = c.send(
            n=1 if streaming else c.rng.choice((1, 1, 2)), streaming=streaming, max_tokens=c.rng.choice((1, 5, 40, 120))
        )
        if c.rng.random() < 0.05:
            loop.call_later(c.rng.random(), leave, job.request.request_id)
        await asyncio.sleep(c.rng.random() * 2 / args.rate)
    await c.settle(120)
    for worker in c.pools.everyone:
        worker.stopped = False
    await asyncio.sleep(2.0)
    ends = Counter(job.ends[0][0] for job in c.jobs if job.ends)
    wrong = 0
    for job in c.jobs:
        try:
            job.check()
        except AssertionError:
            wrong += 1
    recovery = [
        max(
            (job.seen_after(at_s) - at_s for job in c.jobs if job.request.arrival_s <= at_s < (job.ended_s or 0)),
            default=0.0,
        )
        for at_s, _, _ in hand.done
    ]
    alive = [w for w in c.pools.everyone if w.alive]
    stayed = len(c.jobs) - ends[Outcome.CANCELLED]
    table = Table(title=f"chaos in memory, seed {args.seed}", title_justify="left")
    for column in ("fault", "pool", "times"):
        table.add_column(column)
    for (what, role), count in sorted(Counter((what, role) for _, what, role in hand.done).items()):
        table.add_row(what, role, str(count))
    console.print(table)
    for end, count in ends.most_common():
        console.print(f"  {end.value:10} {count}")
    for reason, count in Counter(
        str(j.ends[0][1]) for j in c.jobs if j.ends and j.ends[0][0] is Outcome.FAILED
    ).items():
        console.print(f"  failed: {reason}: {count}")
    return {
        "faults": len(hand.done),
        "offered": len(c.jobs),
        "finished": ends[Outcome.DONE],
        "finished_share": round(ends[Outcome.DONE] / stayed, 5),
        "left": ends[Outcome.CANCELLED],
        "retried": c.dispatcher.retries,
        "migrated": c.dispatcher.migrations,
        "wrong_tokens": wrong,
        "hung": sum(not job.ends or (job.ended_s or 0) - job.request.arrival_s > HANG_S for job in c.jobs),
        "leases_open": sum(w.leases for w in alive) + len(c.dispatcher.leases),
        "leases_outlived": c.dispatcher.leases.counters().outlived,
        "blocks_leaked": sum(w.used_blocks for w in alive),
        "recovery_p50_s": round(statistics.median(recovery), 3),
        "recovery_max_s": round(max(recovery), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=4, help="per pool")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second of virtual time")
    parser.add_argument("--gap-s", type=float, default=1.5, help="mean time between faults")
    parser.add_argument("--attempts", type=int, default=LIMITS.attempts)
    parser.add_argument("--migrations", type=int, default=LIMITS.migrations)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    summary = run_virtual(drive(args, Console(stderr=True, highlight=False)))
    print(json.dumps(summary))
    zero = ("wrong_tokens", "hung", "leases_open", "leases_outlived", "blocks_leaked")
    raise SystemExit(1 if any(summary[n] for n in zero) or summary["finished_share"] < 0.995 else 0)


if __name__ == "__main__":
    main()

"""`python -m tests.chaos.drain`: scale-downs and a rolling update of a cluster under load; no request may notice.

Example: python -m tests.chaos.drain --downs 20

Pools of simulated engines under Ray Serve lose and regain a replica in turn, then every replica of the application
(routers too) is replaced by a rolling update. All the while clients run, among them streams of a minute and more.
Exit status 1 if any request failed, a token was wrong, or a lease or block was left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from cluster.messages import Role
from cluster.runtime.local import free_port
from tests.chaos.clients import Ask, Clients
from tests.chaos.run import MODEL, VOCAB_HIGH, VOCAB_LOW, config, settled, simulated_asks

STEP_S = 0.035
LONG_TOKENS = 1800  # of the 2,048 that the model's context allows: more than a minute


class InProcess:
    """The cluster of this process's Ray, with pools whose size can be set without another change."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from cluster.config import parse

        self._settings = settings
        self._sizes = {role.value: settings["pools"][role.value]["replicas"]["min"] for role in Role}
        self.parse = parse
        self.url = f"http://127.0.0.1:{settings['router']['http']['port']}"
        self.cluster: Any = None

    def start(self) -> None:
        from cluster.runtime.local import start

        self.cluster = start(self.parse(self._settings))
        # From here on by what `serve deploy` does too: there a change of size is no new version.
        self.update()

    def stop(self) -> None:
        if self.cluster is not None:
            self.cluster.stop()

    def resize(self, role: Role, replicas: int) -> None:
        from cluster.autoscaling.deploy import deploy

        self._sizes[role.value] = replicas
        deploy(self.cluster.config, sizes=self._sizes)

    def update(self, timeout_s: float = 600, **changes: Any) -> None:
        """Replace every replica; blocks until the last old one has drained and gone."""
        from cluster.autoscaling.deploy import deploy, wait_until_running

        # The host is what `start` made of it.
        self.cluster.config = self.cluster.config.model_copy(update=changes)
        deploy(self.cluster.config, sizes=self._sizes)
        time.sleep(1.0)
        wait_until_running(self.cluster.config.name, timeout_s)

    async def status(self, http: httpx.AsyncClient) -> dict[str, Any]:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                response = await http.get(f"{self.url}/pdserve/status", timeout=5)
                if response.status_code == 200:
                    value: dict[str, Any] = response.json()
                    return value
            await asyncio.sleep(0.25)

    async def until(self, http: httpx.AsyncClient, role: Role, replicas: int, within_s: float = 120.0) -> None:
        """Wait until a router counts that many replicas."""
        for _ in range(round(within_s / 0.2)):
            if len((await self.status(http))["pools"][role.value]["replicas"]) == replicas:
                return
            await asyncio.sleep(0.2)
        raise SystemExit(f"the {role} pool did not come to {replicas} replicas within {within_s:g} s")


def long_ask(rng: random.Random) -> Ask:
    from cluster.engine.simulation.tokens import TokenStream

    prompt = [rng.randrange(VOCAB_LOW, VOCAB_HIGH) for _ in range(100)]
    return Ask(prompt, TokenStream(prompt, VOCAB_LOW, VOCAB_HIGH).take(LONG_TOKENS), streaming=True)


async def drive(args: argparse.Namespace, cluster: InProcess, console: Console) -> dict[str, Any]:
    async with httpx.AsyncClient() as http:
        short = Clients(cluster.url, MODEL, args.concurrency, simulated_asks, args.seed)
        long = Clients(cluster.url, MODEL, args.streams, long_ask, args.seed + 1, hang_s=240)
        load = asyncio.gather(short.run(), long.run())
        downs = 0
        with console.status("") as line:
            for role in [Role.DECODE, Role.PREFILL] * (args.downs // 2):
                line.update(f"scale-down {downs + 1} of {args.downs}: {role}")
                full = args.prefill if role is Role.PREFILL else args.decode
                await asyncio.to_thread(cluster.resize, role, full - 1)
                await cluster.until(http, role, full - 1)
                downs += 1
                await asyncio.to_thread(cluster.resize, role, full)
                await cluster.until(http, role, full)
            update_s = 0.0
            if args.update:
                line.update("rolling update")
                started = time.monotonic()
                slo = cluster.cluster.config.slo.model_copy(update={"ttft_ms": 501.0})
                await asyncio.to_thread(cluster.update, slo=slo)
                update_s = time.monotonic() - started
            short.stopping = long.stopping = True
            line.update("the last requests")
            await load
            figures = await settled(cluster, http, args.settle_s)  # type: ignore[arg-type]
    asks = [*short.asks, *long.asks]
    ends = Counter(ask.end for ask in asks)
    table = Table(
        title=f"{downs} scale-downs" + (" and one rolling update" if args.update else ""), title_justify="left"
    )
    for column in ("end", "requests", "example"):
        table.add_column(column)
    for end, count in ends.most_common():
        example = next((ask.detail for ask in asks if ask.end == end and ask.detail), "")
        table.add_row(end, str(count), example[:100])
    console.print(table)
    return {
        "scale_downs": downs,
        "rolling_update_s": round(update_s, 1),
        "offered": len(asks),
        "finished": ends["finished"],
        "failed": len(asks) - ends["finished"],
        "client_retries": sum(ask.retried for ask in asks),
        "long_streams": len(long.asks),
        "longest_stream_s": round(max((a.noticed_s[-1] - a.sent_s for a in long.asks), default=0.0), 1),
        "longest_gap_s": round(max((_gap(a) for a in long.asks), default=0.0), 2),
        "wrong_tokens": sum(ask.wrong for ask in asks),
        "leases_open": figures["leases_open"],
        "blocks_leaked": figures["blocks_leaked"],
    }


def _gap(ask: Ask) -> float:
    return max((b - a for a, b in zip(ask.noticed_s, ask.noticed_s[1:], strict=False)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--downs", type=int, default=20)
    parser.add_argument("--no-update", dest="update", action="store_false", help="scale-downs alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--streams", type=int, default=2, help="clients with streams of a minute")
    parser.add_argument("--settle-s", type=float, default=10)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    args = parser.parse_args()
    # Whoever ends this run early must not leave the cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(stderr=True, highlight=False)
    settings = config("simulated", args.port or free_port("127.0.0.1"), args.prefill, args.decode, routers=2)
    settings["engine"]["simulated"] |= {
        "linear": {"fixed_ms": STEP_S * 1e3, "per_prefill_token_us": 150},
    }
    cluster = InProcess(settings)
    try:
        with console.status("starting the cluster"):
            cluster.start()
        summary = asyncio.run(drive(args, cluster, console))
    finally:
        cluster.stop()
    print(json.dumps(summary))
    clean = ("failed", "wrong_tokens", "leases_open", "blocks_leaked")
    raise SystemExit(1 if any(summary[name] for name in clean) else 0)


if __name__ == "__main__":
    main()

"""`python -m tests.chaos.run`: a cluster under load while its processes are killed and stopped.

Example: python -m tests.chaos.run --engine simulated --faults 200

Every token of every answer is compared with the right one: simulated engines have a closed form for it, for vLLM the
answers are recorded from the same cluster before the first fault. Exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console

from cluster.runtime.local import free_port
from tests.chaos.clients import Ask, Clients
from tests.chaos.faults import Breaker, Processes
from tests.chaos.report import Campaign, read, show, summarize

MODEL = "chaos"
VOCAB_LOW, VOCAB_HIGH = 300, 1999
LIMITS = {
    "queue_s": 30, "prefill_s": 20, "first_token_s": 20, "idle_s": 10, "silent_s": 2, "stall_s": 5, "attempts": 4,
    "migrations": 4,
}  # fmt: skip


def config(engine: str, port: int, prefill: int, decode: int, routers: int) -> dict[str, Any]:
    simulated = {
        "linear": {"fixed_ms": 15, "per_prefill_token_us": 150},
        "max_model_len": 2048,
        "kv_blocks": 4000,
        "token_ids": [VOCAB_LOW, VOCAB_HIGH],
    }
    return {
        "name": "chaos",
        "model": {"id": "embedded", "served_name": MODEL},
        "engine": {"kind": engine, **({"simulated": simulated} if engine == "simulated" else {})},
        "pools": {
            "prefill": {"replicas": {"min": prefill, "max": prefill}},
            "decode": {"replicas": {"min": decode, "max": decode}},
        },
        "router": {
            "replicas": routers,
            "limits": LIMITS,
            "http": {"port": port},
            # The transfer is what should be tried: no request is short enough to stay on a decode engine.
            "placement": {"conditional": False},
        },
    }


class Cluster:
    """`pdserve serve` as a process of its own."""

    def __init__(self, settings: dict[str, Any], folder: Path, console: Console) -> None:
        self._file = folder / "cluster.yaml"
        self._file.write_text(yaml.safe_dump(settings))
        self._settings, self._console = settings, console
        self.log = (folder / "serve.log").open("w")
        self.process: subprocess.Popen[str] | None = None
        # Retries and migrations of each router, as last seen: one that was killed counts too.
        self.routers: dict[str, tuple[int, int]] = {}
        self.url = f"http://127.0.0.1:{settings['router']['http']['port']}"

    def start(self) -> None:
        command = [sys.executable, "-m", "cluster.cli", "serve", str(self._file), "--json"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        with self._console.status("starting the cluster"):
            line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the cluster did not start: {self._file.with_name('serve.log').read_text()[-800:]}")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
        if self.process is not None and self.process.stdout is not None:
            self.process.stdout.close()
        self.log.close()

    async def status(self, http: httpx.AsyncClient) -> dict[str, Any]:
        for _ in range(60):
            try:
                response = await http.get(f"{self.url}/pdserve/status", timeout=5)
                if response.status_code == 200:
                    value: dict[str, Any] = response.json()
                    router = value["router"]
                    self.routers[router["id"]] = (router["retries"], router["migrations"])
                    return value
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.25)
        raise SystemExit("no router answers any more")

    async def ready(self, http: httpx.AsyncClient, deployment: str) -> set[int]:
        """Processes of a deployment that requests are sent to now."""
        if deployment == "router":
            # Each answer is of one of them.
            return {(await self.status(http))["router"]["pid"] for _ in range(6 * self._settings["router"]["replicas"])}
        pool = (await self.status(http))["pools"][deployment]
        return {replica["pid"] for replica in pool["replicas"] if replica["state"] == "ready"}


async def settled(cluster: Cluster, http: httpx.AsyncClient, within_s: float) -> dict[str, Any]:
    """Leases and blocks once they no longer change, at most `within_s` after the last request."""
    deadline = time.monotonic() + within_s
    while True:
        pools = (await cluster.status(http))["pools"].values()
        replicas = [replica for pool in pools for replica in pool["replicas"]]
        figures = {
            "leases_open": sum(r["open_leases"] for r in replicas),
            "blocks_leaked": sum(r["kv_used_blocks"] for r in replicas),
            "running": sum(r["running"] + r["waiting"] for r in replicas),
        }
        if not any(figures.values()) or time.monotonic() > deadline:
            return figures
        await asyncio.sleep(0.25)


def simulated_asks(rng: random.Random) -> Ask:
    from cluster.engine.simulation.tokens import TokenStream

    prompt = [rng.randrange(VOCAB_LOW, VOCAB_HIGH) for _ in range(rng.randrange(8, 700))]
    expected = TokenStream(prompt, VOCAB_LOW, VOCAB_HIGH).take(rng.randrange(4, 120))
    streaming = rng.random() < 0.7
    return Ask(prompt, expected, streaming, n=2 if not streaming and rng.random() < 0.2 else 1)


async def recorded_asks(cluster: Cluster, http: httpx.AsyncClient, seed: int):
    """Prompts of the embedded model, with the answers the cluster gives while nothing is broken."""
    rng = random.Random(seed)
    known = []
    for _ in range(12):
        prompt = [rng.randrange(VOCAB_LOW, VOCAB_HIGH) for _ in range(rng.randrange(8, 600))]
        body = {"model": MODEL, "prompt": prompt, "max_tokens": rng.randrange(24, 200), "temperature": 0,
                "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        response = await http.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
        response.raise_for_status()
        known.append((prompt, response.json()["choices"][0]["token_ids"]))

    def make(rng: random.Random) -> Ask:
        prompt, expected = rng.choice(known)
        return Ask(prompt, expected[: rng.randrange(4, len(expected) + 1)], rng.random() < 0.7)

    return make


WEIGHTS = {
    "simulated": {
        ("prefill", "kill"): 3.0, ("decode", "kill"): 3.0, ("prefill", "stop"): 3.0, ("decode", "stop"): 3.0,
        ("router", "kill"): 0.3, ("router", "stop"): 0.7,
    },
    "vllm": {
        ("prefill", "kill"): 1.0, ("decode", "kill"): 1.0, ("prefill", "stop"): 1.0, ("decode", "stop"): 1.0,
        ("prefill", "kill child"): 1.0, ("decode", "kill child"): 1.0,
        ("prefill", "stop child"): 1.0, ("decode", "stop child"): 1.0,
    },
}  # fmt: skip


async def drive(args: argparse.Namespace, cluster: Cluster, seed: int, faults: int, console: Console) -> Campaign:
    async with httpx.AsyncClient() as http:
        make = simulated_asks if args.engine == "simulated" else await recorded_asks(cluster, http, seed)
        assert cluster.process is not None
        clients = Clients(cluster.url, MODEL, args.concurrency, make, seed)
        weights = {k: w for k, w in WEIGHTS[args.engine].items() if k[0] != "router" or args.routers > 1}
        processes = Processes(cluster.process.pid, "chaos")
        breaker = Breaker(processes, lambda d: cluster.ready(http, d), weights, seed + 1, args.gap_s)
        load = asyncio.create_task(clients.run())
        breaking = asyncio.create_task(breaker.run(faults, time.monotonic() + args.limit_s))
        with console.status("") as line:
            while not breaking.done():
                ends = sum(bool(ask.end) for ask in clients.asks)
                line.update(f"{len(breaker.faults)}/{faults} faults, {ends} requests ended")
                await asyncio.wait({breaking}, timeout=0.5)
            await breaking
            line.update("the last requests")
            breaker.release()
            clients.stopping = True
            await load
            ended_s = time.monotonic()
            figures = await settled(cluster, http, args.settle_s)
        for _ in range(4 * args.routers):
            await cluster.status(http)
        return Campaign.of(
            clients.asks,
            breaker.faults,
            leases_open=figures["leases_open"],
            blocks_leaked=figures["blocks_leaked"],
            retried=sum(retries for retries, _ in cluster.routers.values()),
            migrated=sum(migrations for _, migrations in cluster.routers.values()),
            settled_s=time.monotonic() - ended_s,
        )


def campaign(args: argparse.Namespace, seed: int, faults: int, console: Console) -> Campaign:
    """One cluster from its start to its end."""
    with tempfile.TemporaryDirectory(prefix="pdserve-chaos-") as temporary:
        folder = Path(args.keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        # A port of its own: one that was just left has connections in TIME_WAIT and cannot be listened on.
        port = args.port or free_port("127.0.0.1")
        cluster = Cluster(config(args.engine, port, args.prefill, args.decode, args.routers), folder, console)
        try:
            cluster.start()
            return asyncio.run(drive(args, cluster, seed, faults, console))
        finally:
            cluster.stop()


def missed(summary: dict[str, Any], faults: int) -> list[str]:
    bounds = [
        ("faults", summary["faults"] >= faults),
        ("wrong_tokens", summary["wrong_tokens"] == 0),
        ("hung", summary["hung"] == 0),
        ("finished_share", summary["finished_share"] >= 0.995),
        ("leases_open", summary["leases_open"] == 0),
        ("blocks_leaked", summary["blocks_leaked"] == 0),
    ]
    return [name for name, kept in bounds if not kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["simulated", "vllm"], default="simulated")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=3)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--gap-s", type=float, default=1.5, help="mean time between faults")
    parser.add_argument("--limit-s", type=float, default=1500, help="end even if fewer faults were done")
    parser.add_argument("--settle-s", type=float, default=10)
    parser.add_argument("--campaigns", type=int, default=1, help="clusters that share the faults, one after the other")
    parser.add_argument("--record", help="write each campaign beside this path, as PATH.SEED.json")
    parser.add_argument("--add", nargs="*", default=[], help="campaigns recorded before; their faults count")
    parser.add_argument("--port", type=int, default=0, help="0: a free one for each campaign")
    parser.add_argument("--keep", help="folder for the cluster's log instead of a temporary one")
    args = parser.parse_args()
    # Whoever ends this run early must not leave the cluster behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    console = Console(stderr=True, highlight=False)
    done = [read(Path(file)) for file in args.add]
    left = args.faults - sum(len(c.faults) for c in done)
    per = -(-left // args.campaigns) if left > 0 else 0
    for number in range(args.campaigns if left > 0 else 0):
        faults = min(per, left - number * per)
        done.append(campaign(args, args.seed + number, faults, console))
        if args.record:
            done[-1].write(Path(args.record).with_suffix(f".{args.seed + number}.json"))
    summary = summarize(done)
    show(console, f"chaos, {args.engine} engines, {len(done)} cluster(s) from seed {args.seed}", done, summary)
    wrong = missed(summary, args.faults)
    print(json.dumps({"engine": args.engine, **summary, "missed": wrong}))
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

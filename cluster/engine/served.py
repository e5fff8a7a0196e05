"""A served cluster, seen as one engine that can be measured: `pdserve fit --url`.

What is measured is what its clients will get: decode steps with the links, the router and HTTP around them, and prompts
on the pool that computes them (a request for a single token is the prefill pool's own).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.engine.base import EngineDelta, EngineRequest, Sink
from cluster.engine.measure import REST_S, ROUNDS, Measured, Meter
from cluster.errors import EngineFailed, UserError
from cluster.messages import Role, Stage, WorkerInfo
from cluster.perf.profile import HostSlowdown

RECORD_TRIES = 40
BESIDE_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class ServedMeasured:
    """`host_slowdown`: None where one pool does both, or could not be told."""

    info: WorkerInfo
    measured: Measured
    host_slowdown: HostSlowdown | None


async def measure_served(
    url: str,
    api_key: str | None,
    status: Mapping[str, Any],
    repeats: int,
    max_batch: int,
    progress: Callable[[str], None],
    *,
    rounds: int = ROUNDS,
    beside_rounds: int = BESIDE_ROUNDS,
) -> ServedMeasured:
    """Measure a cluster that has nothing else to do.

    Args:
        status: what its `/pdserve/status` says.
        rounds, beside_rounds: of `Meter.run` and `Meter.host_slowdown`.

    Raises:
        UserError: a pool has several replicas, or none.
        EngineFailed: a request failed.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=150, limits=limits) as http:
        engine = ServedEngine(http, status)
        split = "prefill" in status["pools"]
        meter = Meter(engine, int, (300, 1900), random.Random(), progress, mixed=not split, rest_s=REST_S)
        measured = await meter.run(repeats, max_batch, rounds=rounds)
        return ServedMeasured(engine.info, measured, await meter.host_slowdown(beside_rounds) if split else None)


class ServedEngine:
    """
    Args:
        http: with the server's base URL, and the key of an operator where keys are asked for.
        status: what `/pdserve/status` says.

    Raises:
        UserError: a pool has several replicas, or none; they would be measured as if they were one.
    """

    def __init__(self, http: httpx.AsyncClient, status: Mapping[str, Any]) -> None:
        self._http, self.status = http, status
        self._tasks: set[asyncio.Task[None]] = set()
        replicas = {pool: self._only(pool, value["replicas"]) for pool, value in status["pools"].items()}
        replica = replicas["decode"]
        names = ("block_size_tokens", "kv_total_blocks", "kv_bytes_per_token", "max_num_seqs",
                 "max_num_batched_tokens", "max_model_len", "tp", "pp")  # fmt: skip
        self.info = WorkerInfo(
            replica["id"],
            replica["incarnation"],
            Role.DECODE,
            **{name: replica[name] for name in names},
            accelerator_type=replica["accelerator"],
        )

    @staticmethod
    def _only(pool: str, replicas: list[dict[str, Any]]) -> dict[str, Any]:
        if len(replicas) != 1:
            raise UserError(f"--url: the {pool} pool has {len(replicas)} replicas; a profile is measured on one")
        return replicas[0]

    async def start(self, request: EngineRequest, sink: Sink) -> None:
        """`request.sampling` is the number of tokens to generate."""
        task = asyncio.create_task(self._stream(request, sink))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, request: EngineRequest, sink: Sink) -> None:
        body = {
            "model": self.status["model"],
            "prompt": request.prompt_token_ids,
            "max_tokens": request.sampling,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        headers = {"x-request-id": request.request_id}
        try:
            async with self._http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    raise EngineFailed(f"{response.status_code}: {(await response.aread()).decode()[:200]}")
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise EngineFailed(str(event["error"].get("message")))
                        for choice in event["choices"]:
                            sink(request.request_id, EngineDelta(choice.get("token_ids") or []))
            compute_s = await self._compute_s(request.request_id) if request.sampling == 1 else None
            sink(request.request_id, EngineDelta([], finish_reason="length", compute_s=compute_s))
        except EngineFailed as failed:
            sink(request.request_id, failed)
        except (httpx.HTTPError, ValueError, KeyError, TypeError, AttributeError) as error:
            sink(request.request_id, EngineFailed(f"the endpoint failed: {error!r}"))

    async def _compute_s(self, request_id: str) -> float:
        """What the engine itself took for the prompt, from the router's record, which follows the answer."""
        for _ in range(RECORD_TRIES):
            response = await self._http.get("/pdserve/records")
            response.raise_for_status()
            for record in reversed(response.json()):
                if record["client_request_id"] == request_id:
                    return float(record["stage_s"][Stage.PREFILL_COMPUTE.value])
            await asyncio.sleep(0.05)
        raise EngineFailed("no record of a request that ended; the cluster may have several routers")

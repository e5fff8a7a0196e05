"""The cluster as an engine client: vLLM's OpenAI layer above, the dispatcher below."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cluster.engine.base import EngineDelta
from cluster.engine.vllm.serving import Generation, ServingClient
from cluster.errors import BadRequest, PdserveError
from cluster.messages import Outcome, Placement, Request, RequestRecord, Slo
from router.block_keys import block_keys, namespace
from router.dispatcher import Dispatcher
from router.gateway.context import current
from router.seams import Job


class ClientJob:
    """One client request between vLLM's layer and the dispatcher."""

    __slots__ = (
        "_client",
        "_reply",
        "cache_salt",
        "forced",
        "generation",
        "local_only",
        "lora",
        "priority",
        "request",
        "streaming",
        "trace_headers",
    )

    def __init__(self, client: ClusterEngineClient, generation: Generation, request: Request) -> None:
        self._client = client
        self._reply = current().reply
        self.generation = generation
        self.request = request
        self.streaming = generation.streaming
        self.cache_salt = generation.cache_salt
        self.priority = generation.priority
        self.lora = generation.lora
        self.trace_headers = generation.trace_headers
        self.local_only = generation.whole_prompt
        self.forced: Placement | None = None

    def leg(self, choice: int, tokens_sent: int) -> tuple[list[int], Any]:
        return self.generation.leg(choice, tokens_sent)

    def restart(self, choice: int) -> None:
        self._client.restart(self.generation, choice)

    def end(
        self, outcome: Outcome, error: PdserveError | None, finish_reason: str | None, record: RequestRecord
    ) -> None:
        del record
        retry_after_s = getattr(error, "retry_after_s", None)
        if retry_after_s is not None:
            # Of several prompts of one body the refused one speaks; the others end because of it.
            self._reply.retry_after_s = max(retry_after_s, self._reply.retry_after_s or 0.0)
        if error is not None and outcome is not Outcome.CANCELLED:
            self._reply.fail(error)
        if outcome is not Outcome.CANCELLED or error is not None:
            self._client.finish(self.generation, error, finish_reason)


class ClusterEngineClient(ServingClient):
    """vLLM's engine client over the pools.

    Args:
        vllm_config: describes the model; see ServingClient.
        router_id: part of every request id that this router mints.
        slo: default limits of a request.
        key_block_tokens: tokens per block key, as placement has it now.
    """

    def __init__(self, vllm_config: Any, router_id: str, slo: Slo, key_block_tokens: Callable[[], int]) -> None:
        super().__init__(vllm_config)
        self._key_block_tokens = key_block_tokens
        self._router_id = router_id
        self._slo = slo
        self._counter = 0
        self.dispatcher: Dispatcher
        self.on_arrival: Callable[[ClientJob], None] = lambda _: None

    def mint_id(self) -> str:
        self._counter += 1
        return f"{self._router_id}-{self._counter}"

    def submit(self, generation: Generation) -> None:
        context = current()
        if context.cache_salt is not None:
            generation.cache_salt = context.cache_salt
        job = ClientJob(self, generation, self.request_of(generation))
        self.on_arrival(job)
        self.dispatcher.submit(job)

    def request_of(self, generation: Generation) -> Request:
        """What the pure policies see of it."""
        context = current()
        lora = getattr(generation.lora, "lora_name", None)
        keys = block_keys(generation.prompt_token_ids, self._key_block_tokens(), namespace(generation.cache_salt, lora))
        return Request(
            request_id=generation.request_id,
            arrival_s=context.arrival_s or time.monotonic(),
            prompt_tokens=len(generation.prompt_token_ids),
            max_output_tokens=generation.max_output_tokens,
            slo=context.slo or self._slo,
            block_keys=keys,
            tenant=context.tenant,
            priority=generation.priority,
            n=generation.n,
            movable=generation.movable,
        )

    def refused(self, error: BadRequest) -> None:
        current().reply.fail(error)

    def withdraw(self, generation: Generation) -> None:
        self.dispatcher.client_left(generation.request_id)

    def deliver_jobs(self, batch: list[tuple[Job, int, EngineDelta, int | None]]) -> list[tuple[Job, int]]:
        """`deliver` in terms of the dispatcher's jobs; nobody reads the output of jobs that have no client."""
        jobs: dict[int, ClientJob] = {}
        output = []
        for job, choice, delta, cached in batch:
            if isinstance(job, ClientJob):
                jobs[id(job.generation)] = job
                output.append((job.generation, choice, delta, cached))
        return [(jobs[id(generation)], choice) for generation, choice in self.deliver(output)] if output else []

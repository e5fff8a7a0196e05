"""First contact between a prefill and a decode engine costs a handshake; this pays for it before a client does."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

from cluster.errors import PdserveError, TransferFailed
from cluster.messages import Outcome, Path, Placement, Request, RequestRecord, Role, Slo, WorkerInfo
from kv_transfer.compatibility import TpPairs, check_pair
from router.dispatcher import Dispatcher

log = logging.getLogger(__name__)

_LONG = Slo(600.0, 600.0)


class Warmup:
    """Sends one tiny split request through every new pair.

    Args:
        router_id: part of every request id, like a client's: routers share the workers.

    Attributes:
        state: (prefill, decode) -> "warming", "ready", "refused: " and why, or the error of the last try.
    """

    TENANT = "pdserve-warm-up"
    TRIES = 3

    def __init__(self, dispatcher: Dispatcher, router_id: str, vocab_size: int, tp_pairs: TpPairs = "tested") -> None:
        self._dispatcher = dispatcher
        self.router_id = router_id
        self._tp_pairs = tp_pairs
        self._vocab_size = vocab_size
        self._numbers = itertools.count(1)
        self.state: dict[tuple[str, str], str] = {}

    @property
    def warming(self) -> int:
        return sum(s == "warming" for s in self.state.values())

    def on_worker(self, info: WorkerInfo, up: bool) -> None:
        if not up:
            for pair in [p for p in self.state if info.worker_id in p]:
                del self.state[pair]
            return
        for other in list(self._dispatcher.workers.values()):
            if other.role is Role.PREFILL and info.role is Role.DECODE:
                self._warm(other, info, 1)
            elif other.role is Role.DECODE and info.role is Role.PREFILL:
                self._warm(info, other, 1)

    def stop(self) -> None:
        """Withdraw what is under way; a router that drains waits for clients only."""
        self.state.clear()
        for run in self._dispatcher.runs():
            if run.request.tenant == self.TENANT:
                self._dispatcher.client_left(run.request.request_id)

    def _warm(self, prefill: WorkerInfo, decode: WorkerInfo, attempt: int) -> None:
        pair = (prefill.worker_id, decode.worker_id)
        refusals = check_pair(prefill.fingerprint, decode.fingerprint, tp_pairs=self._tp_pairs)
        if refusals:
            self.state[pair] = f"refused: {'; also '.join(map(str, refusals))}"
            log.warning("%s and %s cannot exchange KV: %s", *pair, refusals[0])
            return
        self.state[pair] = "warming"
        tokens = min(prefill.block_size_tokens + 1, prefill.max_model_len - 2)
        number = next(self._numbers)
        prompt = [(7 * i + number) % (self._vocab_size - 3) + 1 for i in range(tokens)]
        self._dispatcher.submit(_WarmJob(self, pair, prompt, number, attempt))

    def ended(self, pair: tuple[str, str], attempt: int, error: PdserveError | None) -> None:
        workers = self._dispatcher.workers
        if pair not in self.state:
            return
        self.state[pair] = "ready" if error is None else str(error)
        if error is not None:
            log.warning("warm-up of %s -> %s failed: %s", *pair, error)
            if attempt < self.TRIES and pair[0] in workers and pair[1] in workers:
                self._warm(workers[pair[0]], workers[pair[1]], attempt + 1)


class _WarmJob:
    streaming = True
    cache_salt: str | None = "pdserve-warm-up"
    priority = 0
    lora = None
    trace_headers = None
    local_only = False

    def __init__(self, owner: Warmup, pair: tuple[str, str], prompt: list[int], number: int, attempt: int) -> None:
        self._owner, self._pair, self._prompt, self._attempt = owner, pair, prompt, attempt
        self.forced: Placement | None = Placement(Path.SPLIT, decode=pair[1], prefill=pair[0])
        self.request = Request(
            request_id=f"{owner.router_id}-warm-{number}",
            arrival_s=time.monotonic(),
            prompt_tokens=len(prompt),
            max_output_tokens=2,
            slo=_LONG,
            tenant=Warmup.TENANT,
            movable=False,
        )

    def leg(self, choice: int, tokens_sent: int) -> tuple[list[int], Any]:
        from cluster.engine.vllm.sampling import greedy

        return self._prompt, greedy(2)

    def restart(self, choice: int) -> None:
        """Nobody reads the output."""

    def end(
        self, outcome: Outcome, error: PdserveError | None, finish_reason: str | None, record: RequestRecord
    ) -> None:
        if error is None and not record.transfer_blocks and record.decode_computed_tokens == record.prompt_tokens:
            error = TransferFailed("the KV was not pulled: the decode engine computed the prompt itself")
        self._owner.ended(self._pair, self._attempt, error)

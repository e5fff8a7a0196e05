"""The open legs of one router, and the leases among them: opens, cancels and settles calls. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cluster.engine.base import EngineRequest
from cluster.errors import RequestError, WorkerLost
from cluster.messages import Ticket, WorkerInfo
from cluster.wire import Output
from kv_transfer.ledger import LeaseEnd, LeaseLedger
from router import lifecycle_messages as msg
from router.run import Run

if TYPE_CHECKING:  # the transport brings Ray along; deciding needs none of it
    from router.transport import Transport


class Leg:
    """One open call. `choice` is None for a prefill leg; `finished`: its engine gave the last output of a choice.

    `pulls` says that it was given a ticket.
    """

    __slots__ = ("attempt", "choice", "finished", "leg_id", "pulls", "run", "worker_id")

    def __init__(
        self, leg_id: str, run: Run, attempt: int, choice: int | None, worker_id: str, *, pulls: bool = False
    ) -> None:
        self.leg_id, self.run, self.attempt, self.choice, self.worker_id = leg_id, run, attempt, choice, worker_id
        self.pulls, self.finished = pulls, False


class Legs:
    """
    Args:
        workers: the workers that this router knows, by id; the dispatcher keeps it.
        ticket_request: the connector's request for a ticket, sent with each prefill leg.
        lost: called, in the loop's next turn, for a leg whose worker is gone before it could be opened.
        clock: seconds; the dispatcher's.
    """

    def __init__(
        self,
        transport: Transport,
        workers: dict[str, WorkerInfo],
        ticket_request: dict[str, Any],
        lost: Callable[[str, RequestError], None],
        clock: Callable[[], float],
    ) -> None:
        self._transport, self._workers, self._ticket_request = transport, workers, ticket_request
        self._lost, self._clock = lost, clock
        self._open: dict[str, Leg] = {}
        self.leases = LeaseLedger()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, leg_id: str) -> Leg | None:
        return self._open.get(leg_id)

    def all(self) -> list[Leg]:
        return list(self._open.values())

    def on(self, worker_id: str) -> list[Run]:
        """Requests with a leg there."""
        return list({id(leg.run): leg.run for leg in self._open.values() if leg.worker_id == worker_id}.values())

    def owing(self) -> set[str]:
        """Workers that must step: they have a prefill without a ticket, or a stream that has begun."""
        return {
            leg.worker_id
            for leg in self._open.values()
            if (leg.run.owes_ticket if leg.choice is None else leg.run.leg_tokens(leg.choice) > 0)
        }

    # Opening

    def start_prefill(self, run: Run, action: msg.StartPrefill) -> None:
        prompt, _ = run.job.leg(0, action.tokens_sent)
        leg = Leg(f"{run.request.request_id}-{action.attempt}p", run, action.attempt, None, action.worker)
        self._start(leg, prompt, None, self._ticket_request)

    def start_decode(self, run: Run, action: msg.StartDecode) -> None:
        if action.tokens_sent == 0 and run.tokens(action.choice):
            run.job.restart(action.choice)
            run.restart(action.choice)
        if action.choice > 0:
            # One prefill for n choices: the first pulls or computes the prompt, the others find it in that engine's
            # prefix cache. A ticket is good for one pull; its KV may be gone after the first.
            run.waiting_choices.append(action)
            return
        self._start_choice(run, action)

    def start_waiting(self, run: Run) -> None:
        """The other choices, once the first has output."""
        waiting, run.waiting_choices = run.waiting_choices, []
        for action in waiting:
            self._start_choice(run, action)

    def _start_choice(self, run: Run, action: msg.StartDecode) -> None:
        prompt, sampling = run.job.leg(action.choice, action.tokens_sent)
        ticket = action.ticket.kv_transfer_params if action.ticket is not None and action.choice == 0 else None
        run.start_leg(action.choice)
        leg_id = f"{run.request.request_id}-{action.attempt}d{action.choice}"
        leg = Leg(leg_id, run, action.attempt, action.choice, action.worker, pulls=ticket is not None)
        self._start(leg, prompt, sampling, ticket)

    def _start(self, leg: Leg, prompt: list[int], sampling: Any, transfer: Any) -> None:
        job = leg.run.job
        self._open[leg.leg_id] = leg
        leg.run.legs.append(leg.leg_id)
        worker = self._workers.get(leg.worker_id)
        if worker is None:
            gone = WorkerLost("the worker is gone", worker_id=leg.worker_id)
            asyncio.get_running_loop().call_soon(self._lost, leg.leg_id, gone)
            return
        request = EngineRequest(
            request_id=leg.leg_id,
            prompt_token_ids=prompt,
            sampling=sampling,
            kv_transfer_params=transfer,
            cache_salt=job.cache_salt,
            priority=job.priority,
            lora=job.lora,
            trace_headers=job.trace_headers,
            predicted_cached_tokens=_predicted_cached_tokens(leg, len(prompt)),
        )
        self._transport.open(worker, "prefill" if leg.choice is None else "serve", request)

    def grant(self, leg: Leg, output: Output, now: float) -> Ticket:
        """The ticket of a finished prefill; its lease is open from now on."""
        info = self._workers.get(leg.worker_id)
        block = info.block_size_tokens if info else 1
        prompt_tokens = leg.run.request.prompt_tokens
        ticket = Ticket(
            lease_id=leg.leg_id,
            worker_id=leg.worker_id,
            incarnation=info.incarnation if info else "",
            kv_transfer_params=output.kv_transfer_params or {},
            prompt_tokens=prompt_tokens,
            cached_tokens=output.cached_tokens or 0,
            blocks=-(-prompt_tokens // block),
            bytes=prompt_tokens * (info.kv_bytes_per_token if info else 0),
            queue_s=output.queue_s or 0.0,
            compute_s=output.compute_s or 0.0,
        )
        self.leases.grant(leg.leg_id, leg.run.request.request_id, ticket.blocks, ticket.bytes, now)
        return ticket

    # Ending

    def ended(self, leg_id: str, how: LeaseEnd | None = None) -> None:
        """The leg ended by itself; `how` its lease did, if it had one."""
        self._open.pop(leg_id, None)
        if how is not None:
            self.leases.end(leg_id, how, self._clock())

    def give_up(self, leg: Leg) -> None:
        """It has failed here. Its worker may have taken the call and know of no failure, so it is told."""
        self.ended(leg.leg_id, LeaseEnd.RELEASED)
        self._transport.cancel(leg.worker_id, leg.leg_id)

    def end_prefill(self, run: Run, action: msg.EndPrefill) -> None:
        leg_id = f"{run.request.request_id}-{action.attempt}p"
        self.leases.end(leg_id, LeaseEnd.PULLED if action.pulled else LeaseEnd.RELEASED, self._clock())
        leg = self._open.pop(leg_id, None)
        if leg is not None:
            self._transport.settle(leg.worker_id, leg_id, pulled=action.pulled)

    def cancel(self, run: Run, attempt: int, choice: int) -> None:
        leg_id = f"{run.request.request_id}-{attempt}d{choice}"
        run.waiting_choices = [w for w in run.waiting_choices if (w.attempt, w.choice) != (attempt, choice)]
        leg = self._open.pop(leg_id, None)
        if leg is not None:
            self._transport.cancel(leg.worker_id, leg_id)

    def forget(self, run: Run) -> tuple[list[str], list[str]]:
        """The request is over. What is still open of it is dropped and named: legs, and leases that outlive it.

        The call of a finished leg ends a moment after its last output, so it does not count.
        """
        left = [leg for leg_id in run.legs if (leg := self._open.pop(leg_id, None)) is not None]
        legs = [leg.leg_id for leg in left if not leg.finished]
        return legs, [lease.lease_id for lease in self.leases.request_ended(run.request.request_id)]


def _predicted_cached_tokens(leg: Leg, prompt_tokens: int) -> int:
    """Placement's prediction is for the engine that computes the prompt; other choices find what the first one left."""
    if leg.choice:
        return prompt_tokens - 1
    placement = leg.run.placement
    return 0 if placement is None else placement.predicted_cached_tokens

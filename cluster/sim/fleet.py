"""A cluster in virtual time: simulated engines around the live router's placement, admission and lifecycle.

What reaches whom, and when, follows router/dispatcher.py and cluster/worker.py: an iteration's load reaches placement
before its outputs reach the requests; KV events reach the index with the load. Nothing here chooses.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from cluster.config import ClusterConfig
from cluster.engine.scheduler.kv import Removed, Stored
from cluster.engine.scheduler.step import Load, Output, Step
from cluster.engine.simulation.settings import EngineSpec, engine_spec
from cluster.errors import BadRequest, LeaseExpired, RequestError, TransferFailed, WorkerLost
from cluster.goodput.accounting import GoodputCounters
from cluster.messages import Path, Placement, Rejection, Request, RequestRecord, Role, WorkerState
from cluster.sim.engine import MAX_REPEATS
from cluster.sim.host import Host
from cluster.sim.kernel import Kernel, Timer
from cluster.sim.request import Leg, RequestRun
from cluster.sim.variation import StepVariation
from cluster.sim.worker import SimWorker
from cluster.workload.arrival import Arrival
from cluster.workload.blocks import block_keys
from router import lifecycle_messages as msg
from router.admission import Admission, Queue
from router.placement import Placer
from router.prefix_index import PrefixIndex
from router.times import WorkerTimes

# How often the queue is looked at while nothing else happens; as router/waiting.py.
PUMP_S = 0.01


@dataclass(frozen=True, slots=True)
class Options:
    """How the simulation itself is run.

    Attributes:
        call_s: from the router's decision to the leg's arrival at the engine.
        reply_s: from the end of an iteration to the router.
        max_repeats: iterations that one event may cover; 1 is the slow, plain way.
        keep_itl: keep every gap between tokens in the records (32 bytes each).
        timeline: keep what every engine did and when (see cluster/sim/trace.py).
        learn: the router begins with a guess of its engines' times and learns them from requests, as a live one
            does; otherwise it is told.
    """

    seed: int = 0
    call_s: float = 0.0
    reply_s: float = 0.0
    max_repeats: int = MAX_REPEATS
    keep_itl: bool = True
    timeline: bool = False
    learn: bool = False


@dataclass(slots=True)
class Decision:
    """One placement, for comparisons with the live path."""

    at_s: float
    request_id: str
    attempt: int
    path: Path | None
    prefill: str | None
    decode: str | None


@dataclass(slots=True)
class Transfer:
    """One pull of KV over the network."""

    source: str
    target: str
    start_s: float
    end_s: float
    bytes: int
    ok: bool = True


@dataclass(slots=True)
class Span:
    """Iterations of one engine, from `start_s` to `end_s`, with one batch."""

    worker: str
    start_s: float
    end_s: float
    iterations: int
    prompt_tokens: int
    decodes: int


@dataclass(slots=True)
class Log:
    """What a run leaves behind beside the records; spans only where a timeline is kept."""

    spans: list[Span] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


class Fleet:
    """All of one simulated cluster.

    Args:
        on_record: called with every finished request.
    """

    def __init__(
        self,
        config: ClusterConfig,
        options: Options | None = None,
        on_record: Callable[[RequestRecord], None] | None = None,
    ) -> None:
        self.config, self.options = config, options or Options()
        self.kernel = Kernel()
        self.specs: dict[Role, EngineSpec] = {Role.DECODE: engine_spec(config, Role.DECODE)}
        if not config.colocated:
            self.specs[Role.PREFILL] = engine_spec(config, Role.PREFILL)
        placement = config.router.placement
        self.times = WorkerTimes() if self.options.learn else None
        self.index = PrefixIndex(placement.index_max_blocks)
        self.placer = Placer(
            placement,
            self.times.of if self.times is not None else lambda info: self.specs[info.role].times,
            self.index,
            colocated=config.colocated,
            tp_pairs=config.kv_transfer.tp_pairs,
        )
        self.admission = Admission(config.router.admission, self.placer, config.slo.to_slo().ttft_s)
        self.workers: dict[str, SimWorker] = {}
        self.gone: list[SimWorker] = []
        self.runs: dict[str, RequestRun] = {}
        self.records: list[RequestRecord] = []
        self.counters = GoodputCounters()
        self.log = Log()
        self._host = Host() if any(spec.settings.host_slowdown for spec in self.specs.values()) else None
        self._legs: dict[str, Leg] = {}
        self._queued: dict[str, tuple[RequestRun, msg.Place]] = {}
        self._pumping = False
        self._pump_timer: Timer | None = None
        self._lease_runs: dict[str, tuple[RequestRun, int]] = {}
        self._rng = random.Random(self.options.seed)
        self._faults = random.Random(self.options.seed + 1)
        self._engine_seed = self.options.seed + 2
        self._named: dict[Role, int] = dict.fromkeys(self.specs, 0)
        self._on_record = on_record
        self._arrived = 0
        self._slo = config.slo.to_slo()
        self._isolated = config.router.tenants.header is not None or bool(
            config.router.tenants.api_keys_file or config.router.tenants.api_keys_env
        )
        for role in self.specs:
            for _ in range(config.pool(role).replicas.start):
                self.add_worker(role)

    # -- workers ------------------------------------------------------------------------------------------------

    def add_worker(self, role: Role) -> SimWorker:
        """A replica that is ready now."""
        number = self._named[role]
        self._named[role] += 1
        spec = self.specs[role]
        worker = SimWorker(
            self.kernel,
            spec,
            spec.info(f"{role.value}-{number}", f"{role.value}-{number}", node=f"node-{number}"),
            random.Random(self._engine_seed * 1_000_003 + number * 2 + (role is Role.DECODE)),
            self._on_output,
            self._on_load,
            max_repeats=self.options.max_repeats,
            record_events=True,
        )
        self.workers[worker.worker_id] = worker
        if spec.settings.host_slowdown is not None:
            worker.engine.host, worker.engine.host_slowdown = self._host, spec.settings.host_slowdown.value()
        if spec.settings.step_variation is not None:
            variation_seed = f"variation/{self._engine_seed}/{role.value}/{number}"
            worker.engine.variation = StepVariation(spec.settings.step_variation, random.Random(variation_seed))
        if self.options.timeline:
            worker.engine.watch = partial(self._watch, worker.worker_id)
        faults = spec.settings.faults
        if faults.die_after_s is not None:
            self.kernel.after(faults.die_after_s, self.kill, worker.worker_id)
        if faults.stall_after_s is not None:
            self.kernel.after(faults.stall_after_s, self.stall, worker.worker_id)
        self.placer.add_worker(worker.info, self.kernel.now)
        # Events reach the index with the load, so it knows the whole cache.
        self.placer.set_index_exact(worker.worker_id, True)
        return worker

    def pool(self, role: Role) -> list[SimWorker]:
        return [w for w in self.workers.values() if w.info.role is role]

    def drain(self, worker: SimWorker) -> None:
        """No new work; the worker leaves when it holds nothing."""
        worker.state = WorkerState.DRAINING
        self.placer.on_snapshot(worker.snapshot(), self.kernel.now)
        self._leave_if_idle(worker)

    def kill(self, worker_id: str) -> None:
        """The process dies: its legs fail, its KV and leases are gone. Unknown ids are ignored."""
        worker = self.workers.pop(worker_id, None)
        if worker is None:
            return
        worker.stop()
        self.gone.append(worker)
        self.placer.remove_worker(worker_id, self.kernel.now)
        lost = WorkerLost("the worker died", worker_id=worker_id)
        for leg_id, leg in list(self._legs.items()):
            if leg.worker is worker and leg_id in self._legs:
                self._leg_failed(leg_id, lost)
        for lease_id, (run, attempt) in list(self._lease_runs.items()):
            if run.placement is not None and run.placement.prefill == worker_id and not worker.holds(lease_id):
                del self._lease_runs[lease_id]
                run.feed(msg.LeaseEnded(attempt, msg.LeaseOutcome.LOST))

    def stall(self, worker_id: str) -> None:
        """The engine makes no step any more but answers."""
        worker = self.workers.get(worker_id)
        if worker is not None:
            worker.engine.stall()

    def _watch(self, worker_id: str, start_s: float, end_s: float, iterations: int, step: Step) -> None:
        prompt_tokens = sum(new for _, new in step.chunks)
        self.log.spans.append(Span(worker_id, start_s, end_s, iterations, prompt_tokens, len(step.decodes)))

    def _leave_if_idle(self, worker: SimWorker) -> None:
        if worker.state is WorkerState.DRAINING and worker.idle and worker.worker_id in self.workers:
            del self.workers[worker.worker_id]
            worker.stop()
            self.gone.append(worker)
            self.placer.remove_worker(worker.worker_id, self.kernel.now)

    # -- requests -----------------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> str:
        """A client's request reaches the router now. Returns its id."""
        self._arrived += 1
        size = self.placer.key_block_tokens
        namespace = zlib.crc32(arrival.tenant.encode()) if self._isolated else 0
        request = Request(
            request_id=str(self._arrived),
            arrival_s=self.kernel.now,
            prompt_tokens=arrival.prompt_tokens,
            max_output_tokens=arrival.output_tokens,
            slo=self._slo,
            block_keys=block_keys(arrival.prompt, size, namespace),
            tenant=arrival.tenant,
            priority=arrival.priority,
        )
        self.counters.start(prompt_tokens=request.prompt_tokens, tenant=request.tenant, priority=request.priority)
        run = RequestRun(self, request, arrival.output_tokens)
        self.runs[request.request_id] = run
        run.feed(msg.Arrived())
        return request.request_id

    def cancel_request(self, request_id: str) -> None:
        """The client leaves."""
        if request_id in self.runs:
            self.runs[request_id].feed(msg.ClientLeft())

    def place(self, run: RequestRun, action: msg.Place) -> None:
        """A first place goes through admission; another one follows a failure and has waited already."""
        self._refresh()
        if action.attempt > 1:
            self._place(run, action)
            return
        verdict = self.admission.offer(run.request, self.kernel.now)
        if isinstance(verdict, Queue):
            self._queued[run.request.request_id] = (run, action)
            self.kernel.after(0.0, self._pump)
        elif isinstance(verdict, Rejection):
            self._decided(run, action, verdict)
        else:
            self._place(run, action)

    def unplace(self, run: RequestRun) -> None:
        request_id = run.request.request_id
        if self._queued.pop(request_id, None) is not None:
            self.admission.remove(request_id)
        self.placer.on_end(request_id, self.kernel.now)

    def _place(self, run: RequestRun, action: msg.Place) -> None:
        now, request = self.kernel.now, run.request
        placed = self.placer.place(request, now, self._rng, exclude=action.exclude, local_only=action.local_only)
        if isinstance(placed, Rejection) and action.exclude:
            placed = self.placer.place(request, now, self._rng, local_only=action.local_only)
        self._decided(run, action, placed)

    def _decided(self, run: RequestRun, action: msg.Place, placed: Placement | Rejection) -> None:
        now, request_id = self.kernel.now, run.request.request_id
        if isinstance(placed, Rejection):
            self.log.decisions.append(Decision(now, request_id, action.attempt, None, None, None))
        else:
            self.log.decisions.append(
                Decision(now, request_id, action.attempt, placed.path, placed.prefill, placed.decode)
            )
        run.on_placed(action, placed)

    def _pump(self) -> None:
        """Place whatever admission lets through now; called when a request has ended on an engine, and now and then."""
        if self._pumping or not len(self.admission):
            return
        self._pumping = True
        self._refresh()
        now = self.kernel.now
        while (request := self.admission.next(now)) is not None:
            self._place(*self._queued.pop(request.request_id))
        for refusal in self.admission.refusals(now):
            entry = self._queued.pop(refusal.request.request_id, None)
            if entry is not None:  # its client may have left since it was displaced
                self._decided(*entry, refusal.rejection)
        self._pumping = False
        if len(self.admission) and self._pump_timer is None:
            self._pump_timer = self.kernel.after(PUMP_S, self._tick)

    def _refresh(self) -> None:
        """A live engine tells its load after every iteration; placement hears of those that one event covers here."""
        for worker in self.workers.values():
            told = worker.progressed()
            if told is not None:
                self.placer.on_snapshot(*told)

    def _tick(self) -> None:
        self._pump_timer = None
        self._pump()

    def suspect(self, action: msg.Suspect) -> None:
        """The router was told that a worker failed a request; a dead one is out already."""

    def finish(self, record: RequestRecord) -> None:
        del self.runs[record.request_id]
        self.placer.on_end(record.request_id, self.kernel.now)
        if self.times is not None:
            self.times.observe(record)
        self.placer.observe(record)
        self.counters.finish(record)
        if not self.options.keep_itl:
            record.itl_s = []
        self.records.append(record)
        if self._on_record:
            self._on_record(record)
        self._pump()

    # -- legs ---------------------------------------------------------------------------------------------------

    def open(self, leg: Leg) -> None:
        self._legs[leg.sequence.seq_id] = leg
        # Never inside the caller's event: an engine that is about to begin an iteration does not know of it yet.
        self.kernel.after(self.options.call_s, self._submit, leg)

    def cancel(self, leg_id: str) -> None:
        leg = self._legs.pop(leg_id, None)
        if leg is not None and not leg.worker.engine.stopped:
            leg.worker.engine.abort(leg_id)
            self._leave_if_idle(leg.worker)

    def end_prefill(self, leg_id: str, *, pulled: bool) -> None:
        """Abort a running prefill, or give its lease back."""
        entry = self._lease_runs.pop(leg_id, None)
        if entry is None:
            self.cancel(leg_id)
            return
        run, _ = entry
        worker = self.workers.get(run.placement.prefill or "") if run.placement else None
        if worker is not None and not pulled:
            worker.release(leg_id)
            self._leave_if_idle(worker)

    def _submit(self, leg: Leg) -> None:
        leg_id = leg.sequence.seq_id
        if leg_id not in self._legs:
            return
        refusal = leg.worker.engine.scheduler.refusal(leg.sequence.prompt_tokens, leg.sequence.stop_after)
        if refusal:
            self._leg_failed(leg_id, BadRequest(refusal, worker_id=leg.worker.worker_id))
        else:
            leg.worker.engine.submit(leg.sequence)

    def _leg_failed(self, leg_id: str, error: RequestError) -> None:
        leg = self._legs.pop(leg_id)
        leg.run.on_leg_failed(leg, error)

    # -- from the engines ---------------------------------------------------------------------------------------

    def _on_output(self, worker: SimWorker, outputs: list[Output]) -> None:
        if self.options.reply_s:
            self.kernel.after(self.options.reply_s, self._deliver, worker, outputs)
        else:
            self._deliver(worker, outputs)

    def _deliver(self, worker: SimWorker, outputs: list[Output]) -> None:
        if worker.worker_id not in self.workers:
            return
        self.placer.on_snapshot(worker.snapshot(), self.kernel.now)
        for event in worker.engine.scheduler.kv.take_events():
            if isinstance(event, Stored):
                self.index.store(worker.worker_id, event.keys, event.parent)
            elif isinstance(event, Removed):
                self.index.remove(worker.worker_id, event.keys)
            else:
                self.index.clear(worker.worker_id)
        for output in outputs:
            sequence = output.sequence
            if not output.finished and sequence.generated != output.tokens:
                continue
            leg = self._legs.get(sequence.seq_id)
            if leg is None:
                if sequence.lease and output.finished:
                    # The request was cancelled while its prefill ended: nobody will pull this.
                    worker.engine.release(sequence.seq_id)
                continue
            if leg.prefill:
                del self._legs[sequence.seq_id]
                self._lease_runs[sequence.seq_id] = (leg.run, leg.attempt)
                worker.grant(sequence.seq_id, self.config.lease_backstop_s, self._on_lease_expired)
                leg.run.on_ticket(leg)
                self._pump()
                continue
            if output.finished:
                del self._legs[sequence.seq_id]
            leg.run.on_tokens(leg, finished=output.finished)
        self._leave_if_idle(worker)

    def _on_lease_expired(self, lease_id: str) -> None:
        entry = self._lease_runs.pop(lease_id, None)
        if entry is not None:
            run, attempt = entry
            run.feed(msg.LeaseEnded(attempt, msg.LeaseOutcome.EXPIRED))

    def _on_load(self, target: SimWorker, load: Load) -> None:
        leg = self._legs.get(load.sequence.seq_id)
        ticket = leg.ticket if leg is not None else None
        source = self.workers.get(ticket.worker_id) if ticket is not None else None
        now = self.kernel.now
        if ticket is None or source is None or not source.holds(ticket.lease_id):
            # Asked in the middle of the target's own scheduling: answer after it.
            self.kernel.after(0.0, self._load_over, target, load, None, now)
            return
        size = load.blocks * target.info.block_size_tokens * target.info.kv_bytes_per_token
        start_s = max(now, source.adapter_free_s, target.adapter_free_s) if size else now
        # The slower side's adapters decide.
        slower_s = max(side.spec.times.transfer_s(size) for side in (source, target))
        end_s = start_s + slower_s if size else start_s
        if size:
            source.adapter_free_s = target.adapter_free_s = end_s
        self.kernel.at(end_s, self._load_over, target, load, (source, size), now)

    def _load_over(self, target: SimWorker, load: Load, pulled: tuple[SimWorker, int] | None, asked_s: float) -> None:
        if target.engine.stopped:
            return
        seq_id, now = load.sequence.seq_id, self.kernel.now
        leg = self._legs.get(seq_id)
        ticket = leg.ticket if leg is not None else None
        alive = pulled is not None and ticket is not None and pulled[0].holds(ticket.lease_id)
        share = target.spec.settings.faults.transfer_failure_share
        broken = share > 0 and self._faults.random() < share
        if leg is None or ticket is None:
            target.engine.load_failed(seq_id, recompute=False)
            self._leave_if_idle(target)
            return
        if not alive or broken or pulled is None:
            recompute = self.config.kv_transfer.on_failure == "recompute"
            if target.engine.load_failed(seq_id, recompute=recompute):
                return
            worker_id = target.worker_id
            error: RequestError = (
                TransferFailed("the KV could not be pulled", worker_id=worker_id)
                if broken
                else LeaseExpired("the prompt's KV expired before it was pulled", worker_id=worker_id)
            )
            self._leg_failed(seq_id, error)
            return
        source, size = pulled
        leg.transfer_s, leg.transfer_bytes, leg.transfer_blocks = now - asked_s, size, load.blocks
        self.log.transfers.append(Transfer(source.worker_id, target.worker_id, asked_s, now, size))
        source.release(ticket.lease_id)
        target.engine.loaded(seq_id)
        entry = self._lease_runs.pop(ticket.lease_id, None)
        if entry is not None:
            run, attempt = entry
            run.feed(msg.LeaseEnded(attempt, msg.LeaseOutcome.PULLED))
        self._leave_if_idle(source)

"""Iteration-level scheduling of one engine: `schedule`, let the step's time pass, `complete`.

    scheduler.add(sequence, now)
    step = scheduler.schedule(now)      who computes what in the next iteration, and how long it takes
    scheduler.complete(step, now)       tokens come out; those that ended leave

The real-time engine and the simulator drive this one object. A step with `repeats` > 1 stands for that many
iterations in which nothing can change unless something arrives; the driver completes as many as have passed.
Memory is reserved for a whole prompt at admission, so whoever runs can go on: when blocks run out, the last in rank
gives its own up, first among those that do not run yet.
"""

from __future__ import annotations

import random
from bisect import insort
from heapq import heappop, heappush
from operator import attrgetter

from cluster.engine.scheduler.config import Policy, Preemption, Reservation, SchedulerConfig
from cluster.engine.scheduler.kv import PagedKv
from cluster.engine.scheduler.sequence import Sequence, State
from cluster.engine.scheduler.step import Counters, Load, Output, Step
from cluster.perf.times import StepTimes

_rank = attrgetter("rank")


class Scheduler:
    """One engine's queue, batch and KV. Times are the driver's clock, in seconds."""

    def __init__(
        self, config: SchedulerConfig, times: StepTimes, rng: random.Random, *, record_events: bool = True
    ) -> None:
        self.config, self.times, self._rng = config, times, rng
        self.kv = PagedKv(config.kv_blocks, prefix_caching=config.prefix_caching, record_events=record_events)
        self.counters = Counters()
        self.queued_prefill_tokens = 0
        self.running: list[Sequence] = []
        self.leased: dict[str, Sequence] = {}
        self._loading: dict[str, Sequence] = {}
        self._ready: list[Sequence] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._waiting_count = 0
        self._live: dict[str, Sequence] = {}
        self._loads: list[Load] = []
        self._in_flight: Step | None = None
        self._ended_in_flight: list[Sequence] = []
        self._forked: set[Sequence] = set()
        self._orders = 0
        self._batch_slots = 0
        self._watermark_blocks = int(config.watermark * config.kv_blocks)

    # -- what others ask ---------------------------------------------------------------------------------------

    @property
    def waiting_count(self) -> int:
        """Sequences accepted that are in no batch: queued, pulling KV, or pulled."""
        return self._waiting_count + len(self._loading) + len(self._ready)

    @property
    def busy(self) -> bool:
        return bool(self.running or self._ready or self._waiting_count)

    def refusal(self, prompt_tokens: int, output_tokens: int) -> str | None:
        """Why a request of this size can never run here; None if it can."""
        size, config = prompt_tokens + output_tokens, self.config
        if prompt_tokens < 1 or output_tokens < 1:
            return "a prompt and an output need at least one token each"
        if size > config.max_model_len:
            return f"{size} tokens of prompt plus output exceed max_model_len {config.max_model_len}"
        # The last token's KV is never written; a speculating step writes up to k more.
        drafts = config.speculation.k if config.speculation else 0
        if self._blocks(self._reserved_tokens(size - 1 + drafts)) > config.kv_blocks:
            return f"{size} tokens exceed the KV memory of {config.kv_blocks * config.block_size_tokens} tokens"
        return None

    # -- events ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence that `refusal` accepts."""
        assert sequence.seq_id not in self._live, f"{sequence.seq_id} was added twice"
        self._orders += 1
        sequence.order, sequence.arrival_s = self._orders, now
        self._live[sequence.seq_id] = sequence
        self._enqueue(sequence)

    def fork(self, parent_id: str, child: Sequence, now: float) -> bool:
        """One more choice from the prompt of a parent that just gave its first token; False if that is not so.

        The child shares all blocks, the partial last one too; whoever writes to that first gets a copy. It computes
        the last prompt token again, whose logits give its own first token.
        """
        parent = self._live.get(parent_id)
        if parent is None or parent.state is not State.RUNNING or parent.generated != 1 or self._in_flight:
            return False
        if len(self.running) >= self.config.max_num_seqs:
            return False
        self._orders += 1
        child.order, child.arrival_s, child.scheduled_s = self._orders, now, now
        child.prompt_tokens, child.keys = parent.prompt_tokens, parent.keys
        child.computed = child.cached_tokens = parent.prompt_tokens - 1
        child.stored_blocks = parent.stored_blocks
        child.table = self.kv.fork(parent.table[: self._blocks(parent.prompt_tokens)])
        child.state = State.RUNNING
        self._live[child.seq_id] = child
        self.queued_prefill_tokens += 1
        insort(self.running, child, key=_rank)
        self._forked.update((parent, child))
        return True

    def abort(self, seq_id: str) -> None:
        """End a sequence wherever it is. Blocks that a step or a transfer still uses are freed when that is over."""
        sequence = self._live.pop(seq_id, None)
        if sequence is None:
            return
        state, sequence.state = sequence.state, State.ENDED
        if state is State.WAITING:
            self._waiting_count -= 1
            self.queued_prefill_tokens -= self._queued_tokens(sequence)
        elif state is State.LOADING:
            self.queued_prefill_tokens -= 1
        elif state is State.READY:
            self._ready.remove(sequence)
            self.queued_prefill_tokens -= 1
            self.kv.release(sequence.table)
        elif state is State.LEASED:
            del self.leased[seq_id]
            self.kv.release(sequence.table)
        elif state is State.RUNNING:
            self.running.remove(sequence)
            if not sequence.generated:
                self.queued_prefill_tokens -= sequence.total - sequence.computed
            self._forked.discard(sequence)
            if self._in_flight:
                self._ended_in_flight.append(sequence)
            else:
                self.kv.release(sequence.table)

    def release(self, seq_id: str) -> bool:
        """The KV of a leased sequence was pulled or given up. False if there was no such lease."""
        if seq_id not in self.leased:
            return False
        self.abort(seq_id)
        return True

    def loaded(self, seq_id: str) -> bool:
        """The ticket's KV arrived. False if the sequence was aborted meanwhile (its blocks are free now)."""
        sequence = self._loading.pop(seq_id)
        if sequence.state is State.ENDED:
            self.kv.release(sequence.table)
            return False
        # The last prompt token is computed here: its logits give the first output token.
        sequence.computed = sequence.prompt_tokens - 1
        self.counters.external_prompt_tokens += sequence.external_tokens
        self._store(sequence)
        sequence.state = State.READY
        insort(self._ready, sequence, key=_rank)
        return True

    def load_failed(self, seq_id: str, *, recompute: bool) -> bool:
        """The KV could not be pulled: compute the prompt here, or end the sequence. False if it has ended."""
        sequence = self._loading.pop(seq_id)
        self.kv.release(sequence.table)
        if sequence.state is State.ENDED:
            return False
        self.queued_prefill_tokens -= 1
        sequence.external_tokens = sequence.computed = 0
        if not recompute:
            del self._live[seq_id]
            sequence.state = State.ENDED
            return False
        sequence.remote = False
        self._enqueue(sequence)
        return True

    def take_loads(self) -> list[Load]:
        """Transfers that `schedule` wants started; each ends in `loaded` or `load_failed`."""
        loads = self._loads
        if loads:
            self._loads = []
        return loads

    # -- one iteration -----------------------------------------------------------------------------------------

    def schedule(self, now: float, max_repeats: int = 1) -> Step | None:
        """The next iteration, or None if no sequence can compute. The previous one must be complete."""
        assert self._in_flight is None, "the previous step is not complete"
        config = self.config
        step = Step()
        budget = config.max_num_batched_tokens if config.policy is Policy.CHUNKED else 1 << 60
        budget -= self._schedule_running(step, budget)
        blocked = True
        if config.policy is not Policy.STATIC or not self.running:
            blocked = self._admit(step, budget, now)
            if config.policy is Policy.STATIC:
                self._batch_slots = len(self.running)
        if not step.decodes and not step.chunks:
            return None
        if config.speculation and step.decodes:
            step.draft_tokens = config.speculation.k * len(step.decodes)
        # A first token is news for others: no repeats behind it.
        steady = blocked and not step.chunks and all(s.generated for s in step.decodes)
        self._price(step, max_repeats if steady else 1)
        self._in_flight = step
        return step

    def complete(self, step: Step, repeats: int = 1) -> list[Output]:
        """The first `repeats` iterations of the step have passed, and no other is run. Outputs are in rank order."""
        outputs = self._pass(step, repeats)
        self._in_flight = None
        for sequence in self._ended_in_flight:
            self.kv.release(sequence.table)
        self._ended_in_flight.clear()
        return outputs

    def advance(self, step: Step, repeats: int) -> None:
        """The first `repeats` iterations have passed; what is left of the step runs on, with those who are in it.

        That is no news for others: in a step of several iterations nobody gets a first token, nor a last one before its
        last iteration.
        """
        assert repeats < step.repeats
        self._pass(step, repeats)
        for sequence in step.decodes:
            if sequence.state is State.RUNNING:
                # As `schedule` does: the iteration that runs writes one more token.
                grown = self.kv.grow(sequence.table, self._blocks(sequence.computed + 1))
                assert grown, "a repeated step outgrew the KV memory that was checked for it"
        step.decode_context_tokens += repeats * len(step.decodes)
        del step.durations_s[:repeats]

    def _pass(self, step: Step, repeats: int) -> list[Output]:
        """What the first iterations of the running step have computed."""
        assert step is self._in_flight and 1 <= repeats <= step.repeats
        counters = self.counters
        first_step = counters.steps
        counters.steps += repeats
        outputs: list[Output] = []
        for sequence, new in step.chunks:
            if sequence.state is not State.RUNNING:
                continue
            sequence.computed += new
            if sequence.generated:
                counters.recomputed_tokens += new
            else:
                self.queued_prefill_tokens -= new
                counters.computed_prompt_tokens += new
            self._store(sequence)
            if sequence.computed == sequence.total:
                self._emit(sequence, first_step, 1, 1, outputs)
        speculation = self.config.speculation
        if repeats > 1:
            # Before anybody ends and frees blocks: these were taken while the iterations ran.
            for sequence in step.decodes:
                if sequence.state is State.RUNNING:
                    grown = self.kv.grow(sequence.table, self._blocks(sequence.computed + repeats))
                    assert grown, "a repeated step outgrew the KV memory that was checked for it"
        for sequence in step.decodes:
            if sequence.state is not State.RUNNING:
                continue
            if not sequence.generated:
                # One prompt token was left: after a pull, or behind a cached prefix.
                self.queued_prefill_tokens -= 1
                counters.computed_prompt_tokens += 1
            tokens = 1
            if speculation:
                tokens = self._accepted(speculation.k, speculation.acceptance, sequence)
            sequence.computed += repeats + tokens - 1
            if len(sequence.keys) > sequence.stored_blocks:
                self._store(sequence)
            self._emit(sequence, first_step, repeats, tokens, outputs)
        if self.config.policy is Policy.STATIC:
            useful = len(step.decodes) + len(step.chunks)
            counters.padded_slot_steps += repeats * max(self._batch_slots - useful, 0)
        return outputs

    # -- parts of schedule -------------------------------------------------------------------------------------

    def _schedule_running(self, step: Step, budget: int) -> int:
        """Decodes first, then prompts already begun. Returns the tokens taken."""
        drafts = self.config.speculation.k if self.config.speculation else 0
        size, taken = self.config.block_size_tokens, 0
        started: list[Sequence] = []
        # Preemption removes from the end of the list, so walking by index is safe.
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            index += 1
            total = sequence.prompt_tokens + sequence.generated
            if total - sequence.computed > 1:
                started.append(sequence)
                continue
            if taken >= budget:
                break
            if (total + drafts + size - 1) // size > len(sequence.table) and not self._make_room(
                sequence, self._blocks(total + drafts), step
            ):
                break
            if sequence in self._forked and not self._own_last(sequence, step):
                break
            step.decodes.append(sequence)
            step.decode_context_tokens += sequence.computed
            taken += 1 + drafts
        for sequence in started:
            new = min(budget - taken, sequence.total - sequence.computed)
            if new <= 0:
                break
            if sequence.state is State.RUNNING:
                step.chunks.append((sequence, new))
                taken += new
        return taken

    def _admit(self, step: Step, budget: int, now: float) -> bool:
        """Fill free batch slots. Returns whether admission is blocked until a sequence ends or something arrives."""
        config = self.config
        while len(self.running) < config.max_num_seqs:
            if budget <= 0:
                return False
            if self._ready:
                sequence = self._ready.pop(0)
            else:
                head = self._head()
                if head is None:
                    return True
                if not self._fits_budget(head, step):
                    return False
                if not self._reserve(head, step):
                    return True
                heappop(self._waiting)
                self._waiting_count -= 1
                if head.remote:
                    self._start_load(head)
                    continue
                sequence = head
            budget -= self._start(sequence, step, budget, now)
        # With all batch slots taken, KV can still be pulled ahead, one batch's worth at most.
        while len(self._loading) + len(self._ready) < config.max_num_seqs:
            head = self._head()
            if head is None or not head.remote or not self._reserve(head, step):
                break
            heappop(self._waiting)
            self._waiting_count -= 1
            self._start_load(head)
        return True

    def _start(self, sequence: Sequence, step: Step, budget: int, now: float) -> int:
        """Put an admitted sequence into the batch. Returns the tokens it takes."""
        sequence.state = State.RUNNING
        if sequence.scheduled_s is None:
            sequence.scheduled_s = now
        insort(self.running, sequence, key=_rank)
        new = sequence.total - sequence.computed
        if new == 1 and (sequence.computed or sequence.generated):
            step.decodes.append(sequence)
            step.decode_context_tokens += sequence.computed
            return 1
        if self.config.policy is Policy.CHUNKED:
            new = min(new, budget)
        step.chunks.append((sequence, new))
        return new

    def _fits_budget(self, head: Sequence, step: Step) -> bool:
        if head.remote or self.config.policy is not Policy.CONTINUOUS:
            return True
        planned = sum(new for _, new in step.chunks)
        return not planned or planned + head.total - head.computed <= self.config.max_num_batched_tokens

    def _reserve(self, sequence: Sequence, step: Step) -> bool:
        """Hold blocks for all tokens of the sequence, the cached prefix shared: whoever is admitted or loaded can
        take its next step whatever the others hold."""
        size, kv = self.config.block_size_tokens, self.kv
        drafts = self.config.speculation.k if self.config.speculation else 0
        # At least one token must be computed to have logits.
        hit = kv.match(sequence.keys, (sequence.total - 1) // size) if self.config.prefix_caching else 0
        count = self._blocks(self._reserved_tokens(sequence.total + drafts))
        others = self.running or self._ready or self._loading
        if others and count - hit > kv.available_blocks - self._watermark_blocks:
            return False
        table = kv.acquire(sequence.keys, hit, count)
        if table is None:
            return False
        sequence.table = table
        sequence.stored_blocks = hit
        self.queued_prefill_tokens -= self._queued_tokens(sequence)
        if sequence.swapped:
            moved = self._blocks(sequence.computed) - hit
            step.swapped_blocks += max(moved, 0)
            sequence.swapped = False
        else:
            sequence.computed = hit * size
            if not sequence.generated:
                sequence.cached_tokens = sequence.computed
                self.counters.cached_prompt_tokens += sequence.computed
        if not sequence.generated and not sequence.remote:
            self.queued_prefill_tokens += sequence.total - sequence.computed
        return True

    def _start_load(self, sequence: Sequence) -> None:
        sequence.state = State.LOADING
        sequence.external_tokens = max(sequence.prompt_tokens - sequence.computed, 0)
        if sequence.computed >= sequence.prompt_tokens - 1:
            sequence.external_tokens = 0
        self.queued_prefill_tokens += 1
        self._loading[sequence.seq_id] = sequence
        held = self._blocks(sequence.prompt_tokens) - sequence.stored_blocks
        self._loads.append(Load(sequence, sequence.external_tokens, held if sequence.external_tokens else 0))

    def _make_room(self, sequence: Sequence, blocks: int, step: Step) -> bool:
        """Grow a running sequence's table, at the cost of whoever is last in rank; False if that is itself."""
        while not self.kv.grow(sequence.table, blocks):
            if not self._preempt_last(sequence, step):
                return False
        return True

    def _own_last(self, sequence: Sequence, step: Step) -> bool:
        index = sequence.computed // self.config.block_size_tokens
        while (copied := self.kv.own(sequence.table, index)) is None:
            if not self._preempt_last(sequence, step):
                return False
        if copied is False:
            self._forked.discard(sequence)
        return True

    def _preempt_last(self, asking: Sequence, step: Step) -> bool:
        """Take the blocks of the last in rank; False if that is the one that asks."""
        victim = self._ready.pop() if self._ready else self.running.pop()
        self._forked.discard(victim)
        victim.preemptions += 1
        self.counters.preemptions += 1
        if self.config.preemption is Preemption.SWAP:
            step.swapped_blocks += self._blocks(victim.computed)
            victim.swapped = True
        if not victim.generated:
            self.queued_prefill_tokens -= victim.total - victim.computed
        self.kv.release(victim.table)
        if not victim.swapped:
            victim.computed = 0
        victim.remote = False
        self._enqueue(victim)
        return victim is not asking

    # -- small things ------------------------------------------------------------------------------------------

    def _price(self, step: Step, max_repeats: int) -> None:
        times, config, batch = self.times, self.config, len(step.decodes)
        context = step.decode_context_tokens
        if max_repeats > 1 and not config.speculation and not step.swapped_blocks:
            repeats = self._horizon(step.decodes, max_repeats)
            step.durations_s = times.decode_run_s(batch, context, repeats)
            return
        prefill = [(new, sequence.computed) for sequence, new in step.chunks]
        duration = times.step_s(prefill, batch, context, step.draft_tokens)
        if config.speculation and batch:
            plain = times.step_s((), batch, context)
            duration += config.speculation.k * config.speculation.draft_cost_ratio * plain
        if step.swapped_blocks:
            self.counters.swapped_blocks += step.swapped_blocks
            moved_bytes = step.swapped_blocks * config.block_size_tokens * config.kv_bytes_per_token
            duration += moved_bytes / config.swap_bytes_per_s
        step.durations_s = [duration]

    def _horizon(self, decodes: list[Sequence], limit: int) -> int:
        """Iterations, at most `limit`, in which this batch changes only by its contexts: none ends before the last
        one, memory suffices, and no forked block is to be copied."""
        if self._forked:
            return 1
        steps = min(limit, min(s.stop_after - s.generated for s in decodes))
        size = self.config.block_size_tokens
        while steps > 1:
            needed = 0
            for sequence in decodes:
                missing = -(-(sequence.computed + steps) // size) - len(sequence.table)
                if missing > 0:
                    needed += missing
            if needed <= self.kv.available_blocks:
                break
            steps //= 2
        return steps

    def _emit(self, sequence: Sequence, first_step: int, steps: int, tokens: int, outputs: list[Output]) -> None:
        runs = sequence.runs
        if runs and runs[-1][2] == tokens and runs[-1][0] + runs[-1][1] == first_step:
            runs[-1][1] += steps
        else:
            runs.append([first_step, steps, tokens])
        new = steps * tokens
        sequence.generated += new
        self.counters.generated_tokens += new
        self.counters.slot_steps += steps
        finished = sequence.generated >= sequence.stop_after
        if finished:
            self._end(sequence)
        outputs.append(Output(sequence, new, finished))

    def _end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._forked.discard(sequence)
        if sequence.lease:
            sequence.state = State.LEASED
            self.leased[sequence.seq_id] = sequence
            return
        sequence.state = State.ENDED
        del self._live[sequence.seq_id]
        self.kv.release(sequence.table)

    def _accepted(self, k: int, acceptance: float, sequence: Sequence) -> int:
        """Tokens of one speculating step: the target's own and the drafts before the first rejection."""
        accepted = 0
        while accepted < k and self._rng.random() < acceptance:
            accepted += 1
        self.counters.drafted_tokens += k
        self.counters.accepted_draft_tokens += accepted
        return min(1 + accepted, sequence.stop_after - sequence.generated)

    def _store(self, sequence: Sequence) -> None:
        full = min(sequence.computed // self.config.block_size_tokens, len(sequence.keys))
        if full > sequence.stored_blocks:
            self.kv.store(sequence.table, sequence.keys, sequence.stored_blocks, full, sequence.seq_id)
            sequence.stored_blocks = full

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        heappush(self._waiting, (sequence.priority, sequence.order, sequence))
        self._waiting_count += 1
        self.queued_prefill_tokens += self._queued_tokens(sequence)

    def _queued_tokens(self, sequence: Sequence) -> int:
        """What a waiting sequence adds to `queued_prefill_tokens`: prompt tokens to compute, as far as is known."""
        if sequence.generated:
            return 0
        return 1 if sequence.remote else sequence.prompt_tokens - sequence.computed

    def _head(self) -> Sequence | None:
        while self._waiting:
            sequence = self._waiting[0][2]
            if sequence.state is State.WAITING:
                return sequence
            heappop(self._waiting)
        return None

    def _reserved_tokens(self, tokens: int) -> int:
        return tokens if self.config.reservation is Reservation.PAGED else self.config.max_model_len

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size_tokens)

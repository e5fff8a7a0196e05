"""Iteration-level scheduling: token accounting, policies, preemption, tickets, sharing, speculation."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.scheduler.config import Policy, Preemption, Reservation, SchedulerConfig, Speculation
from cluster.engine.scheduler.scheduler import Scheduler
from cluster.engine.scheduler.sequence import Sequence, State
from cluster.perf.times import LinearTimes


def scheduler(kv_blocks: int = 64, **more: Any) -> Scheduler:
    return Scheduler(SchedulerConfig(kv_blocks=kv_blocks, **more), LinearTimes(), random.Random(0))


def drain(s: Scheduler, now: float = 0.0, limit: int = 100_000) -> dict[str, float]:
    """Run to the end; when each sequence ended."""
    ends = {}
    for _ in range(limit):
        step = s.schedule(now)
        for load in s.take_loads():
            s.loaded(load.sequence.seq_id)
        if step is None:
            if not s.busy:
                return ends
            continue
        now += step.durations_s[0]
        for output in s.complete(step):
            if output.finished:
                ends[output.sequence.seq_id] = now
    raise AssertionError("no progress")


def test_a_prompt_is_computed_once_and_its_last_step_gives_the_first_token() -> None:
    s = scheduler()
    sequence = Sequence("a", 40, 3)
    s.add(sequence, 0.0)
    assert s.queued_prefill_tokens == 40
    step = s.schedule(0.0)
    assert step is not None
    assert [(c[0].seq_id, c[1]) for c in step.chunks] == [("a", 40)]
    assert step.durations_s == [LinearTimes().step_s(((40, 0),), 0, 0)]
    (output,) = s.complete(step)
    assert (output.tokens, output.finished, s.queued_prefill_tokens) == (1, False, 0)
    assert len(sequence.table) == 3
    drain(s)
    assert sequence.state is State.ENDED
    assert sequence.runs == [[0, 3, 1]]
    assert s.kv.used_blocks == 0


def test_chunked_gives_decodes_their_tokens_first() -> None:
    s = scheduler(max_num_batched_tokens=64, max_num_seqs=8)
    s.add(Sequence("short", 10, 50), 0.0)
    first = s.schedule(0.0)
    assert first is not None
    s.complete(first)
    long = Sequence("long", 200, 2)
    s.add(long, 0.0)
    sizes = []
    for _ in range(4):
        step = s.schedule(0.0)
        assert step is not None
        assert [d.seq_id for d in step.decodes] == ["short"]
        sizes.append([new for _, new in step.chunks])
        s.complete(step)
    assert sizes == [[63], [63], [63], [11]]
    assert long.generated == 1


def test_continuous_takes_whole_prompts_and_static_waits_for_its_batch() -> None:
    s = scheduler(policy=Policy.CONTINUOUS, max_num_batched_tokens=100)
    for name, prompt in (("a", 60), ("b", 60), ("c", 300)):
        s.add(Sequence(name, prompt, 5), 0.0)
    steps = []
    for _ in range(3):
        step = s.schedule(0.0)
        assert step is not None
        steps.append([(q.seq_id, new) for q, new in step.chunks])
        s.complete(step)
    assert steps == [[("a", 60)], [("b", 60)], [("c", 300)]]

    s = scheduler(policy=Policy.STATIC, max_num_seqs=2)
    for name, output in (("a", 4), ("b", 8), ("c", 2)):
        s.add(Sequence(name, 10, output), 0.0)
    ends = drain(s)
    assert ends["a"] < ends["b"] < ends["c"]
    assert s.counters.padded_slot_steps == 4


def test_static_batch_waste() -> None:
    """Outputs 4, 8, 12, 20 in one batch: 44 useful of 80 occupied slots."""
    s = scheduler(policy=Policy.STATIC, max_num_seqs=4)
    for number, output in enumerate((4, 8, 12, 20)):
        s.add(Sequence(str(number), 10, output), 0.0)
    drain(s)
    assert s.counters.slot_steps == 44
    assert s.counters.padded_slot_steps == 36


def test_a_cached_prefix_is_shared_and_not_computed() -> None:
    s = scheduler()
    keys = tuple(range(100, 104))
    s.add(Sequence("a", 64, 4, keys), 0.0)
    drain(s)
    second = Sequence("b", 64, 4, keys)
    s.add(second, 0.0)
    drain(s)
    # All four blocks are known, but the last token must be computed to have logits: three are used.
    assert second.cached_tokens == 48
    assert s.counters.computed_prompt_tokens == 64 + 16


@pytest.mark.parametrize("how", Preemption)
def test_preemption_takes_from_the_last_in_rank_and_all_tokens_still_come(how: Preemption) -> None:
    s = scheduler(kv_blocks=8, preemption=how, prefix_caching=False)
    sequences = [Sequence(str(i), 30, 40, priority=i == 0) for i in range(3)]
    for sequence in sequences:
        s.add(sequence, 0.0)
    ends = drain(s)
    assert [q.generated for q in sequences] == [40, 40, 40]
    assert s.counters.preemptions > 0
    assert max(ends, key=ends.__getitem__) == "0", "the request of lower rank did not pay"
    assert sequences[1].preemptions == 0
    assert (s.counters.recomputed_tokens > 0) == (how is Preemption.RECOMPUTE)
    assert (s.counters.swapped_blocks > 0) == (how is Preemption.SWAP)
    assert s.kv.used_blocks == 0


def test_contiguous_reservation_admits_fewer() -> None:
    batch = {}
    for how in Reservation:
        s = scheduler(kv_blocks=64, reservation=how, max_model_len=256)
        for i in range(40):
            s.add(Sequence(str(i), 20, 30), 0.0)
        step = s.schedule(0.0)
        assert step is not None
        batch[how] = len(step.chunks)
    assert batch == {Reservation.CONTIGUOUS: 4, Reservation.PAGED: 32}


def test_a_lease_pins_blocks_until_it_is_released() -> None:
    s = scheduler(kv_blocks=8)
    s.add(Sequence("p", 100, 1, lease=True), 0.0)
    drain(s)
    assert (s.kv.used_blocks, list(s.leased)) == (7, ["p"])
    s.add(Sequence("q", 40, 1), 0.0)
    assert s.schedule(0.0) is None, "leased blocks were given away"
    assert s.release("p")
    assert not s.release("p")
    assert "q" in drain(s)


def test_admission_of_pulled_kv_cannot_deadlock() -> None:
    """Pool of 7 blocks; A pulls 4 and needs one more, B pulls 3 and needs one more."""
    s = scheduler(kv_blocks=7, prefix_caching=False)
    s.add(Sequence("A", 64, 20, remote=True), 0.0)
    s.add(Sequence("B", 48, 20, remote=True), 0.0)
    assert set(drain(s)) == {"A", "B"}
    assert s.kv.used_blocks == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(list(Policy)),
    how=st.sampled_from(list(Preemption)),
    speculate=st.booleans(),
    blocks=st.integers(14, 30),
)
def test_any_load_ends_with_nothing_left(
    seed: int, policy: Policy, how: Preemption, speculate: bool, blocks: int
) -> None:
    """Random sizes around the pool's, pulls that come late or fail, aborts at any time: all end, nothing leaks."""
    rng = random.Random(seed)
    s = scheduler(
        kv_blocks=blocks,
        policy=policy,
        preemption=how,
        max_num_seqs=6,
        max_num_batched_tokens=48,
        speculation=Speculation(3, 0.6) if speculate else None,
    )
    alive: dict[str, Sequence] = {}
    loads: list[str] = []
    ended: set[str] = set()
    aborted: set[str] = set()
    turns = 0
    made = 0
    while made < 25 or alive or loads or s.leased:
        turns += 1
        assert turns < 20_000, "no progress"
        if made < 25 and rng.random() < 0.4:
            made += 1
            prompt, output = rng.randint(1, 120), rng.randint(1, 60)
            if s.refusal(prompt, output) is None:
                keys = tuple(rng.choice((0, 1000)) + i for i in range(prompt // 16))
                kind = rng.random()
                sequence = Sequence(str(made), prompt, output, keys, remote=kind < 0.4, lease=kind > 0.8)
                if sequence.lease:
                    sequence.stop_after = 1
                alive[sequence.seq_id] = sequence
                s.add(sequence, 0.0)
        step = s.schedule(0.0)
        loads += [load.sequence.seq_id for load in s.take_loads()]
        if alive and rng.random() < 0.03:
            victim = rng.choice(list(alive))
            s.abort(victim)
            del alive[victim]
            aborted.add(victim)
        if loads and rng.random() < 0.5:
            # A transfer may end while a step runs.
            which = loads.pop(rng.randrange(len(loads)))
            if rng.random() < 0.8:
                s.loaded(which)
            elif not s.load_failed(which, recompute=rng.random() < 0.5) and which in alive:
                del alive[which]
                aborted.add(which)
        if s.leased and rng.random() < 0.3:
            s.release(next(iter(s.leased)))
        if step is not None:
            for output in s.complete(step):
                sequence = output.sequence
                assert sequence.seq_id not in aborted
                if output.finished:
                    assert sequence.seq_id not in ended, "ended twice"
                    assert sequence.generated == sequence.stop_after
                    ended.add(sequence.seq_id)
                    del alive[sequence.seq_id]
        assert s.kv.used_blocks + s.kv.available_blocks == blocks
        assert s.queued_prefill_tokens >= 0
    assert s.kv.used_blocks == 0
    assert s.queued_prefill_tokens == 0
    assert not s.busy
    assert s.waiting_count == 0


def test_one_prefill_many_choices_and_who_writes_first_copies() -> None:
    s = scheduler(prefix_caching=False)
    s.add(Sequence("a", 40, 10), 0.0)
    step = s.schedule(0.0)
    assert step is not None
    s.complete(step)
    children = [Sequence(f"c{i}", 0, 10) for i in range(2)]
    for child in children:
        assert s.fork("a", child, 0.0)
    assert s.kv.used_blocks == 3, "a choice costs no memory before it writes"
    ends = drain(s)
    assert set(ends) == {"a", "c0", "c1"}
    assert s.kv.copies == 2
    assert s.counters.computed_prompt_tokens == 40 + 2, "each choice computes the last prompt token again"
    assert s.kv.used_blocks == 0
    assert not s.fork("a", Sequence("late", 0, 1), 0.0)


def test_an_abort_in_a_step_frees_its_blocks_after_the_step() -> None:
    s = scheduler()
    s.add(Sequence("a", 40, 5), 0.0)
    step = s.schedule(0.0)
    assert step is not None
    s.abort("a")
    s.abort("a")
    assert s.kv.used_blocks == 3, "blocks that a step writes to were given away"
    assert s.complete(step) == []
    assert s.kv.used_blocks == 0
    assert s.queued_prefill_tokens == 0


def test_what_runs_on_has_a_block_for_its_next_token() -> None:
    s = scheduler()
    sequence = Sequence("a", 16, 200)
    s.add(sequence, 0.0)
    first = s.schedule(0.0)
    assert first is not None
    s.complete(first)
    step = s.schedule(0.0, 128)
    assert step is not None
    for _ in range(60):
        s.advance(step, 1)
        assert len(sequence.table) == -(-(sequence.computed + 1) // 16), "as a fresh schedule would hold"
    s.complete(step)
    drain(s)
    assert s.kv.used_blocks == 0


def test_speculation_gives_the_expected_tokens_a_step() -> None:
    """E = (1 - alpha^(k+1)) / (1 - alpha) (Leviathan et al., 2023)."""
    alpha, k = 0.7, 4
    s = scheduler(kv_blocks=4096, speculation=Speculation(k, alpha))
    s.add(Sequence("a", 10, 40_000), 0.0)
    drain(s)
    steps = s.counters.steps - 1
    expected = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert 40_000 / steps == pytest.approx(expected, rel=0.02)
    rejected = 1 - s.counters.accepted_draft_tokens / s.counters.drafted_tokens
    assert rejected == pytest.approx(0.557, abs=0.01)


def test_what_can_never_run_is_refused() -> None:
    s = scheduler(kv_blocks=4, max_model_len=100)
    assert s.refusal(60, 5) is None
    assert s.refusal(60, 6) is not None, "the 65th token's KV has no block"
    assert "max_model_len 100" in (s.refusal(90, 11) or "")
    assert s.refusal(0, 5) is not None

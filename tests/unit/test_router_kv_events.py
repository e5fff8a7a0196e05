"""KV events: the index equals what the engine really holds, through loss, duplicates, reordering and restarts."""

import hashlib
import random
from collections import OrderedDict

import msgspec
import pytest

from router.block_keys import block_keys, namespace
from router.kv_events import POLL_S, REORDER_S, REPLAY_TIMEOUT_S, SILENCE_S, KvEventStream, Quality
from router.prefix_index import PrefixIndex

BLOCK = 4


class EngineCache:
    """A paged prefix cache that announces blocks like vLLM: own hash chain, LRU, duplicate copies, tail first."""

    def __init__(self, blocks: int, start_ts: float = 0.0, block_size: int = BLOCK) -> None:
        self.blocks, self.block_size, self.ts = blocks, block_size, start_ts
        self.lru: OrderedDict[int, bytes] = OrderedDict()  # physical block -> hash
        self.copies: dict[bytes, int] = {}
        self.physical = 0
        self.events: list[dict] = []
        self.log: list[tuple[int, bytes]] = []

    def chain(self, tokens: list[int], salt: str | None) -> list[bytes]:
        digest, out, size = b"root", [], self.block_size
        for i in range(len(tokens) // size):
            extra = (salt if i == 0 else None,)
            digest = hashlib.sha256(digest + repr((tokens[i * size : (i + 1) * size], extra)).encode()).digest()
            out.append(digest)
        return out

    def hit_blocks(self, tokens: list[int], salt: str | None = None) -> int:
        return next(
            (i for i, h in enumerate(self.chain(tokens, salt)) if h not in self.copies), len(tokens) // self.block_size
        )

    def serve(self, tokens: list[int], salt: str | None = None, *, twice: bool = False) -> None:
        hashes = self.chain(tokens, salt)
        hit = self.hit_blocks(tokens, salt)
        touched = hashes[:hit]
        for _ in range(2 if twice else 1):
            new = hashes[hit:]
            if new:
                size = self.block_size
                self.events.append(
                    {
                        "type": "BlockStored",
                        "block_hashes": new,
                        "parent_block_hash": hashes[hit - 1] if hit else None,
                        "token_ids": tokens[hit * size : len(hashes) * size],
                        "block_size": size,
                        "lora_id": None,
                        "medium": "GPU",
                        "lora_name": None,
                        "extra_keys": [(salt,) if salt and hit + i == 0 else None for i in range(len(new))],
                        "group_idx": 0,
                    }
                )
            for h in reversed(new):
                self.physical += 1
                self.lru[self.physical] = h
                self.copies[h] = self.copies.get(h, 0) + 1
        for block in [b for b, h in self.lru.items() if h in touched][::-1]:
            self.lru.move_to_end(block)
        # Tails are older than heads, as an engine frees them first.
        order = {h: i for i, h in enumerate(hashes)}
        for block, _ in sorted(((b, h) for b, h in self.lru.items() if h in order), key=lambda e: -order[e[1]]):
            self.lru.move_to_end(block)
        while len(self.lru) > self.blocks:
            _, h = self.lru.popitem(last=False)
            self.copies[h] -= 1
            if not self.copies[h]:
                del self.copies[h]
            self.events.append({"type": "BlockRemoved", "block_hashes": [h], "medium": "GPU", "group_idx": 0})

    def reset(self) -> None:
        self.lru.clear()
        self.copies.clear()
        self.events.append({"type": "AllBlocksCleared"})

    def publish(self) -> tuple[int, bytes] | None:
        if not self.events:
            return None
        self.ts += 0.01
        batch = len(self.log), msgspec.msgpack.encode([self.ts, self.events, 0])
        self.events = []
        self.log.append(batch)
        return batch


def traffic(rng: random.Random, engine: EngineCache, prompts: list[list[int]]) -> list[int]:
    if prompts and rng.random() < 0.7:
        base = rng.choice(prompts[-20:])
        tokens = base[: rng.randrange(len(base) + 1)] + [rng.randrange(500) for _ in range(rng.randrange(1, 30))]
    else:
        tokens = [rng.randrange(500) for _ in range(rng.randrange(1, 60))]
    prompts.append(tokens)
    engine.serve(tokens, twice=rng.random() < 0.1)
    return tokens


def predicted(index: PrefixIndex, tokens: list[int], space: bytes = b"") -> int:
    return index.longest_match(block_keys(tokens, BLOCK, space)).get("w", 0)


def answer(stream: KvEventStream, engine: EngineCache, now: float, keep: int = 10_000) -> bool:
    """Serve a replay request the way the publisher does: everything it still has from a number on, then the end."""
    start = stream.replay_from(now)
    if start is None:
        return False
    for seq, payload in engine.log[-keep:]:
        if seq >= start:
            stream.on_replay(seq, payload, now)
    stream.on_replay_end(now)
    return True


def started(index: PrefixIndex, engine: EngineCache, *, replayable: bool = True) -> KvEventStream:
    stream = KvEventStream("w", index, BLOCK, replayable=replayable, now=0.0)
    if replayable:
        assert answer(stream, engine, 0.0)
    return stream


@pytest.mark.parametrize("seed", range(10))
def test_undisturbed_the_prediction_is_the_engines_own_hit(seed):
    rng, index, engine, prompts = random.Random(seed), PrefixIndex(), EngineCache(60), []
    stream = started(index, engine)
    for i in range(300):
        tokens = traffic(rng, engine, prompts)
        if i % 97 == 96:
            engine.reset()
        if batch := engine.publish():
            stream.on_batch(*batch, now=0.0)
        for probe in (tokens, rng.choice(prompts)):
            assert predicted(index, probe) == engine.hit_blocks(probe)
    assert stream.quality is Quality.EXACT
    assert stream.counts.unresolved_blocks == stream.counts.malformed == 0
    assert index.stats.entries == len(engine.copies)


@pytest.mark.parametrize("seed", range(10))
def test_every_tenth_batch_lost_duplicated_or_late_converges_with_replay(seed):
    rng, index, engine, prompts = random.Random(seed), PrefixIndex(), EngineCache(60), []
    stream = started(index, engine)
    now, late = 0.0, []
    for _ in range(600):
        now += 0.1
        traffic(rng, engine, prompts)
        batch = engine.publish()
        fate = rng.random()
        if batch and fate < 0.1:
            pass  # lost
        elif batch and fate < 0.2:
            late.append(batch)
        elif batch:
            stream.on_batch(*batch, now=now)
            if fate < 0.3:
                stream.on_batch(*batch, now=now)
        if late and rng.random() < 0.3:
            stream.on_batch(*late.pop(0), now=now)
        if rng.random() < 0.2:
            answer(stream, engine, now)
    # The disturbance ends; within five seconds (a silence and an answer) the prediction is exact again.
    end = now + 5.0
    while now < end:
        now += 0.1
        answer(stream, engine, now)
    for probe in prompts[-50:]:
        assert predicted(index, probe) == engine.hit_blocks(probe)
    assert stream.quality is Quality.EXACT
    assert stream.counts.gaps > 10
    assert stream.counts.duplicates > 10
    assert stream.counts.resyncs == 0


def test_a_lost_last_batch_is_asked_for_after_a_silence():
    index, engine = PrefixIndex(), EngineCache(60)
    stream = started(index, engine)
    engine.serve(list(range(40)))
    engine.publish()  # never delivered
    assert not answer(stream, engine, SILENCE_S / 2)
    assert predicted(index, list(range(40))) == 0
    assert answer(stream, engine, SILENCE_S + 0.1)
    assert predicted(index, list(range(40))) == 10


def test_a_deaf_subscription_is_replaced_by_asking_more_often():
    index, engine = PrefixIndex(), EngineCache(1000)
    stream = started(index, engine)
    now, asked = 0.0, []
    for i in range(100):
        now += 0.1
        engine.serve([i] * 40)
        engine.publish()
        if answer(stream, engine, now):
            asked.append(now)
    assert stream.deaf
    assert len(asked) > 20
    assert sum(predicted(index, [i] * 40) for i in range(100)) >= 97 * 10
    engine.serve([100] * 40)
    for batch in engine.log[stream.expected :]:
        stream.on_batch(*batch, now=now)
    stream.on_batch(*engine.publish(), now=now)
    assert not stream.deaf
    assert not answer(stream, engine, now + POLL_S * 2)


@pytest.mark.parametrize("replayable", [True, False])
def test_loss_without_a_way_back_drops_the_worker_and_never_predicts_too_much(replayable):
    rng, index, engine, prompts = random.Random(5), PrefixIndex(), EngineCache(60), []
    stream = started(index, engine, replayable=replayable)
    now = 0.0
    for i in range(400):
        now += 0.3
        traffic(rng, engine, prompts)
        batch = engine.publish()
        if batch and i % 10:
            stream.on_batch(*batch, now=now)
        answer(stream, engine, now, keep=1)  # the publisher's buffer holds one batch
        if stream.expected == len(engine.log):  # the loss of a last batch shows only with the next one
            for probe in prompts[-20:]:
                assert predicted(index, probe) <= engine.hit_blocks(probe)
    assert stream.quality is Quality.PARTIAL
    assert stream.counts.resyncs > 5


def test_reordering_within_the_wait_is_no_loss_without_replay():
    index, engine = PrefixIndex(), EngineCache(60)
    stream = KvEventStream("w", index, BLOCK, replayable=False, now=0.0)
    batches = []
    for i in range(3):
        engine.serve(list(range(40 + 8 * i)))
        batches.append(engine.publish())
    stream.on_batch(*batches[0], now=0.0)
    stream.on_batch(*batches[2], now=0.0)
    assert stream.replay_from(REORDER_S / 2) is None
    stream.on_batch(*batches[1], now=REORDER_S / 2)
    assert predicted(index, list(range(56))) == 14
    assert stream.quality is Quality.EXACT
    assert stream.counts.resyncs == 0


def test_restart_with_the_same_id_is_a_new_epoch():
    index, engine = PrefixIndex(), EngineCache(60)
    stream = started(index, engine)
    for i in range(5):
        engine.serve([i] * 40)
        stream.on_batch(*engine.publish(), now=1.0)
    assert predicted(index, [3] * 40) == 10
    restarted = EngineCache(60, start_ts=engine.ts + 30)
    restarted.serve([99] * 40)
    stream.on_batch(*restarted.publish(), now=31.0)
    assert [predicted(index, [i] * 40) for i in range(5)] == [0] * 5
    assert predicted(index, [99] * 40) == 10
    assert stream.counts.epochs == 1
    assert stream.quality is Quality.EXACT
    # A late duplicate of the old epoch's first batch changes nothing.
    stream.on_batch(*engine.log[0], now=32.0)
    assert predicted(index, [0] * 40) == 0
    assert predicted(index, [99] * 40) == 10


def test_a_router_that_starts_late_learns_history_and_is_partial_when_there_is_none():
    rng, engine, prompts = random.Random(6), EngineCache(60), []
    for _ in range(100):
        traffic(rng, engine, prompts)
        engine.publish()
    index = PrefixIndex()
    stream = started(index, engine)
    assert stream.quality is Quality.EXACT
    assert all(predicted(index, p) == engine.hit_blocks(p) for p in prompts)

    index = PrefixIndex()
    stream = KvEventStream("w", index, BLOCK, replayable=True, now=0.0)
    answer(stream, engine, 0.0, keep=20)
    answer(stream, engine, 0.1, keep=20)  # the gap showed only in the first answer, so it asks once more
    assert stream.quality is Quality.PARTIAL
    assert not stream.behind
    assert all(predicted(index, p) <= engine.hit_blocks(p) for p in prompts)
    tokens = [7] * 40
    engine.serve(tokens)
    stream.on_batch(*engine.publish(), now=1.0)
    assert predicted(index, tokens) == 10


def test_live_batches_during_the_first_replay_are_held_not_lost():
    engine, index = EngineCache(60), PrefixIndex()
    for i in range(5):
        engine.serve([i] * 40)
        engine.publish()
    stream = KvEventStream("w", index, BLOCK, replayable=True, now=0.0)
    assert stream.replay_from(0.0) == 0
    engine.serve([9] * 40)
    stream.on_batch(*engine.publish(), now=0.0)
    assert predicted(index, [9] * 40) == 0
    for seq, payload in engine.log:
        stream.on_replay(seq, payload, 0.05)
    stream.on_replay_end(0.05)
    assert predicted(index, [9] * 40) == predicted(index, [0] * 40) == 10
    assert stream.quality is Quality.EXACT


def test_a_silent_replay_endpoint_is_asked_again_and_then_given_up():
    engine, index = EngineCache(60), PrefixIndex()
    for i in range(3):
        engine.serve([i] * 40)
        engine.publish()
    stream = KvEventStream("w", index, BLOCK, replayable=True, now=0.0)
    stream.on_batch(*engine.log[2], now=0.0)
    asked = [t for t in range(20) if stream.replay_from(t * REPLAY_TIMEOUT_S) is not None]
    assert asked[:3] == [0, 1, 2]
    assert stream.quality is Quality.PARTIAL
    assert predicted(index, [2] * 40) == 10


def test_tenants_and_adapters_never_share():
    engine, index = EngineCache(200), PrefixIndex()
    stream = started(index, engine)
    tokens = list(range(64))
    engine.serve(tokens, "salt-a")
    stream.on_batch(*engine.publish(), now=0.0)
    assert predicted(index, tokens, namespace("salt-a")) == 16
    for other in (b"", namespace("salt-b"), namespace("salt-a", "adapter"), namespace(None, "salt-a")):
        assert predicted(index, tokens, other) == 0


def test_adapter_blocks_get_the_adapters_namespace():
    engine, index = EngineCache(200), PrefixIndex()
    stream = started(index, engine)
    tokens = list(range(16))
    engine.serve(tokens)
    event = dict(engine.events[0], lora_name="sql", extra_keys=[("sql", "salt")] + [("sql",)] * 3)
    engine.events = [event]
    stream.on_batch(*engine.publish(), now=0.0)
    assert predicted(index, tokens, namespace("salt", "sql")) == 4
    assert predicted(index, tokens, namespace("salt")) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"extra_keys": [[["image", 0]], None, None, None]},
        {"extra_keys": [None, [["image", 0]], None, None]},
        {"block_size": 3, "token_ids": list(range(12))},
        {"token_ids": list(range(15))},
        {"parent_block_hash": b"?" * 32},
    ],
    ids=["image first", "image later", "small block", "short", "unknown parent"],
)
def test_what_cannot_be_keyed_is_counted_and_left_out(change):
    engine, index = EngineCache(200), PrefixIndex()
    stream = started(index, engine)
    tokens = list(range(16))
    engine.serve(tokens)
    engine.events = [dict(engine.events[0], **change)]
    stream.on_batch(*engine.publish(), now=0.0)
    assert index.stats.entries == 0
    assert stream.counts.unresolved_blocks == 4


@pytest.mark.parametrize("change", [{"medium": "CPU"}, {"locality": "REMOTE"}, {"group_idx": 1}])
def test_other_tiers_and_groups_are_ignored(change):
    engine, index = EngineCache(200), PrefixIndex()
    stream = started(index, engine)
    engine.serve(list(range(16)))
    engine.events = [dict(engine.events[0], **change)]
    stream.on_batch(*engine.publish(), now=0.0)
    assert index.stats.entries == 0
    assert stream.counts.malformed == 0


def test_larger_engine_blocks_become_several_keys():
    engine, index = EngineCache(200, block_size=4 * BLOCK), PrefixIndex()
    stream = started(index, engine)
    tokens = list(range(50))
    engine.serve(tokens)
    stream.on_batch(*engine.publish(), now=0.0)
    assert predicted(index, tokens) == 12
    engine.blocks = 1
    engine.serve(tokens[:16])
    stream.on_batch(*engine.publish(), now=0.0)
    assert predicted(index, tokens) == 4 * engine.hit_blocks(tokens) == 4


def test_integer_hashes_and_array_events_of_older_engines():
    index = PrefixIndex()
    stream = KvEventStream("w", index, BLOCK, replayable=False, now=0.0)
    stored = ["BlockStored", [1, 2], None, list(range(8)), BLOCK, None]
    stream.on_batch(0, msgspec.msgpack.encode([0.0, [stored]]), now=0.0)
    assert predicted(index, list(range(8))) == 2
    stream.on_batch(1, msgspec.msgpack.encode([0.1, [["BlockRemoved", [2]]]]), now=0.0)
    assert predicted(index, list(range(8))) == 1
    stream.on_batch(2, msgspec.msgpack.encode([0.2, [["AllBlocksCleared"]]]), now=0.0)
    assert predicted(index, list(range(8))) == 0


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([0.0, [{"type": "New"}]]), b"\x93\x01"])
def test_malformed_batches_drop_the_worker_and_the_stream_goes_on(payload):
    engine, index = EngineCache(60), PrefixIndex()
    stream = started(index, engine)
    engine.serve([1] * 40)
    stream.on_batch(*engine.publish(), now=0.0)
    stream.on_batch(1, payload, now=0.0)
    assert stream.counts.malformed == 1
    assert stream.quality is Quality.PARTIAL
    assert predicted(index, [1] * 40) == 0
    engine.log.append((1, payload))
    engine.serve([2] * 40)
    stream.on_batch(*engine.publish(), now=0.0)
    assert predicted(index, [2] * 40) == 10

"""The prefix index against a model that walks every block, and its bounds."""

import random

import pytest

from router.block_keys import block_keys
from router.prefix_index import PrefixIndex


def prompt(rng: random.Random, parents: list[tuple[int, ...]], depth: int = 12) -> tuple[int, ...]:
    """A chain of keys that shares a random prefix with an earlier one, as conversations do."""
    if parents and rng.random() < 0.7:
        base = rng.choice(parents)
        base = base[: rng.randrange(len(base) + 1)]
    else:
        base = ()
    chain = base + tuple(rng.getrandbits(60) for _ in range(rng.randrange(1, depth)))
    parents.append(chain)
    return chain


def walked(held: dict[str, set[int]], keys: tuple[int, ...]) -> dict[str, int]:
    out = {}
    for worker, mine in held.items():
        depth = next((i for i, key in enumerate(keys) if key not in mine), len(keys))
        if depth:
            out[worker] = depth
    return out


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(("workers", "depth"), [(3, 12), (130, 12), (3, 150), (70, 400)])
def test_equals_a_walk_over_every_block_whatever_happens(seed, workers, depth):
    """Stores with and without known parents, removals in any order (holes), clears, over 64-worker planes.

    Long chains go through numpy, short ones row by row.
    """
    rng = random.Random(seed)
    index, held, parents = PrefixIndex(), {}, []
    names = [f"w{i}" for i in range(workers)]
    for _ in range(150):
        worker = rng.choice(names[:3] if rng.random() < 0.5 else names)
        mine = held.setdefault(worker, set())
        action = rng.random()
        if action < 0.55 or not parents:
            chain = prompt(rng, parents, depth)
            start = rng.randrange(len(chain)) if rng.random() < 0.3 else 0
            index.store(worker, chain[start:], chain[start - 1] if start else None)
            mine.update(chain[start:])
        elif action < 0.95:
            chain = rng.choice(parents)
            some = rng.sample(chain, rng.randrange(1, len(chain) + 1))
            some = list(reversed(chain))[: len(some)] if rng.random() < 0.5 else some
            index.remove(worker, some)
            mine.difference_update(some)
        else:
            index.clear(worker)
            held.pop(worker)
        for _ in range(3):
            keys = rng.choice(parents) if parents else ()
            assert index.longest_match(keys) == walked(held, keys)
        assert index.stats.entries == sum(map(len, held.values()))
        assert all(index.held_blocks(w) == len(mine) for w, mine in held.items())
    for worker in list(held):
        index.clear(worker)
    assert index.stats.blocks == index.stats.entries == index.stats.holes == 0


def test_long_events_that_name_a_block_twice_count_it_once():
    keys = tuple(range(100, 200))
    index = PrefixIndex()
    index.store("a", (*keys, 199))
    assert index.stats.blocks == index.stats.entries == 100
    index = PrefixIndex()
    index.store("a", keys)
    index.remove("a", [*keys, *keys])
    assert index.stats.blocks == index.stats.entries == index.stats.holes == 0


def test_leaf_first_eviction_makes_no_holes_and_a_middle_removal_makes_one():
    index, keys = PrefixIndex(), tuple(range(100, 110))
    index.store("a", keys)
    index.remove("a", reversed(keys[5:]))
    assert index.stats.holes == 0
    index.remove("a", [keys[2]])
    assert index.stats.holes == 1
    assert index.longest_match(keys) == {"a": 2}
    index.store("a", [keys[2]], keys[1])
    assert index.stats.holes == 0
    assert index.longest_match(keys) == {"a": 5}


def test_stored_before_its_parent_is_unreachable_until_the_parent_comes():
    index, keys = PrefixIndex(), tuple(range(100, 110))
    index.store("a", keys[5:], keys[4])
    assert index.longest_match(keys) == {}
    index.store("a", keys[:5])
    assert index.longest_match(keys) == {"a": 10}
    assert index.stats.blocks == 10


@pytest.mark.parametrize("cap", [1, 7, 1000])
def test_cap_bounds_blocks_and_never_invents_any(cap):
    rng = random.Random(3)
    index, parents = PrefixIndex(max_blocks=cap), []
    ever: dict[str, set[int]] = {}
    for i in range(800):
        worker = f"w{i % 4}"
        chain = prompt(rng, parents[-50:], depth=40)
        parents.append(chain)
        start = rng.randrange(len(chain)) if rng.random() < 0.1 else 0
        index.store(worker, chain[start:], chain[start - 1] if start else None)
        ever.setdefault(worker, set()).update(chain[start:])
        assert index.stats.blocks <= cap
        for match in (index.longest_match(chain), index.longest_match(rng.choice(parents))):
            assert all(depth <= len(chain) or depth for depth in match.values())
        truth = walked(ever, chain)
        assert all(depth <= truth.get(w, 0) for w, depth in index.longest_match(chain).items())
    assert index.stats.dropped_blocks > 0
    for worker in ever:
        index.clear(worker)
        assert index.held_blocks(worker) == 0
    assert index.stats.blocks == index.stats.entries == 0


def test_the_newest_prompt_is_findable_at_the_cap():
    rng = random.Random(4)
    index = PrefixIndex(max_blocks=10_000)
    system = tuple(rng.getrandbits(60) for _ in range(20))
    for i in range(3000):
        chain = system + tuple(rng.getrandbits(60) for _ in range(30))
        index.store(f"w{i % 8}", chain)
        assert index.longest_match(chain)[f"w{i % 8}"] == 50
        assert index.stats.blocks <= 10_000
    # The shared prefix outlives the branches that are dropped.
    assert set(index.longest_match(system).values()) == {20}


def test_one_prompt_longer_than_the_cap():
    index = PrefixIndex(max_blocks=1000)
    index.store("a", tuple(range(50)))
    keys = block_keys(list(range(160_000)), 16)
    index.store("b", keys)
    assert index.stats.blocks <= 1000
    assert 0 < index.longest_match(keys)["b"] <= 1000
    index.clear("b")
    index.store("a", tuple(range(50)))
    assert index.longest_match(tuple(range(50))) == {"a": 50}


def test_fan_out_counts_the_ways_prompts_go_on():
    index = PrefixIndex()
    for i in range(100):
        index.store(f"w{i % 3}", (1, 2, 1000 + i))
    assert [index.fan_out(key) for key in (1, 2, 1000, 77)] == [1, 64, 0, 0]
    assert index.fan_out(2, most=1000) == 100


def test_unknown_names_and_keys_are_ignored():
    index = PrefixIndex()
    index.remove("nobody", [1, 2])
    index.clear("nobody")
    index.store("a", ())
    assert index.longest_match(()) == index.longest_match((1, 2)) == {}
    assert index.stats.workers == 0


def test_a_freed_lane_is_reused_empty():
    index = PrefixIndex()
    index.store("a", (1, 2, 3))
    index.clear("a")
    index.store("b", (9,))
    assert index.longest_match((1, 2, 3)) == {}
    assert index.longest_match((9,)) == {"b": 1}


def test_a_bad_bound_is_refused():
    with pytest.raises(ValueError, match="max_blocks"):
        PrefixIndex(max_blocks=0)

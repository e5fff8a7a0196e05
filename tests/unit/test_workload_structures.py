"""Prompt structures share what real applications share; workloads repeat by seed and keep their rates."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.workload.arrival import Arrival, count_tokens, cut, shared_tokens
from cluster.workload.blocks import block_keys
from cluster.workload.spec import Bounds, Workload, parse

KINDS = ["plain", "chat", "rag", "code", "agent", "batch"]


def workload(kind: str, *, requests: int = 400, rate: float = 5.0, **prompts: object) -> Workload:
    return parse(
        {
            "requests": requests,
            "arrivals": {"process": "poisson", "rate_per_s": rate},
            "prompts": {"kind": kind, **prompts},
        }
    )


def reuse(arrivals: list[Arrival], block: int = 16) -> float:
    """Share of prompt tokens that an endless cache would not compute."""
    seen: set[int] = set()
    total = hit = 0
    for a in arrivals:
        keys = block_keys(a.prompt, block)
        total += a.prompt_tokens
        for key in keys:
            if key not in seen:
                break
            hit += block
        seen.update(keys)
    return hit / total


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_requests_other_seed_other_content(kind: str) -> None:
    w = workload(kind)
    first, again, other = list(w.arrivals()), list(w.arrivals()), list(w.arrivals(seed=1))
    assert first == again
    assert len(first) == 400
    assert all(a.output_tokens >= 1 and all(n >= 1 for _, n in a.prompt) for a in first)
    mine = {content for a in first for content, _ in a.prompt}
    theirs = {content for a in other for content, _ in a.prompt}
    assert not mine & theirs, "another seed may not meet cached content of this one"


def test_structures_reuse_what_their_applications_reuse() -> None:
    share = {kind: reuse(list(workload(kind).arrivals())) for kind in KINDS}
    assert share["plain"] == 0
    assert share["chat"] > 0.4
    assert share["agent"] > 0.6
    assert share["code"] > 0.6
    assert share["batch"] > 0.6
    assert 0.1 < share["rag"] < 0.6


def test_a_varying_part_in_front_destroys_reuse() -> None:
    good, bad = workload("rag"), workload("rag", varying_first=True)
    assert reuse(list(bad.arrivals())) == 0 < reuse(list(good.arrivals()))
    # The same material, only in another order.
    assert [a.prompt_tokens for a in good.arrivals()] == [a.prompt_tokens for a in bad.arrivals()]


def test_a_chat_turn_contains_everything_said_before() -> None:
    by_session: dict[int, list[Arrival]] = {}
    for a in workload("chat", turns=5, think_s=0.1).arrivals():
        by_session.setdefault(a.session, []).append(a)
    assert max(len(turns) for turns in by_session.values()) == 5
    for turns in by_session.values():
        for before, after in itertools.pairwise(turns):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert after.prompt[len(before.prompt)][1] == before.output_tokens
            assert after.at_s >= before.at_s


def test_chat_respects_the_pause_of_a_conversation() -> None:
    # With pauses far longer than the run nobody can have come back.
    arrivals = list(workload("chat", turns=5, think_s=1e9).arrivals())
    assert len({a.session for a in arrivals}) == len(arrivals)


def test_agent_tasks_branch() -> None:
    by_session: dict[int, list[Arrival]] = {}
    for a in workload("agent", branch=0.5, steps=20, concurrent_tasks=2).arrivals():
        by_session.setdefault(a.session, []).append(a)
    parents = Counter(a.prompt[:-1] for turns in by_session.values() for a in turns)
    assert max(parents.values()) >= 2
    straight = workload("agent", branch=0.0, steps=20, concurrent_tasks=2)
    chains = Counter(a.prompt[:-1] for a in straight.arrivals() if len(a.prompt) > 2)
    assert max(chains.values()) == 1


def test_streams_are_merged_in_time_with_their_tenants_and_shares() -> None:
    w = parse(
        {
            "duration_s": 200,
            "streams": [
                {"tenant": "quiet", "arrivals": {"process": "constant", "rate_per_s": 1}, "prompts": {"kind": "chat"}},
                {
                    "tenant": "noisy",
                    "priority": 5,
                    "arrivals": {"process": "gamma", "rate_per_s": 9, "cv": 3},
                    "prompts": {"kind": "batch"},
                },
            ],
        }
    )
    arrivals = list(w.arrivals())
    assert [a.at_s for a in arrivals] == sorted(a.at_s for a in arrivals)
    count = Counter((a.tenant, a.priority) for a in arrivals)
    assert count["quiet", 0] == 200
    assert 1300 < count["noisy", 5] < 2300
    faster = Counter(a.tenant for a in w.at_rate(2).arrivals())
    assert faster["quiet"] == 400


def test_bounds_cut_instead_of_dropping() -> None:
    bounds = Bounds(max_total_tokens=600, max_output_tokens=50)
    bounded = list(workload("chat").model_copy(update={"bounds": bounds}).arrivals())
    assert len(bounded) == 400
    assert max(a.prompt_tokens + a.output_tokens for a in bounded) == 600
    assert max(a.output_tokens for a in bounded) == 50


@pytest.mark.parametrize(
    ("raw", "path"),
    [
        ({"requests": 3}, "workload"),
        (
            {"requests": 3, "arrivals": {"process": "poisson", "rate_per_s": 0}, "prompts": {"kind": "chat"}},
            "rate_per_s",
        ),
        ({"arrivals": {"process": "poisson", "rate_per_s": 1}, "prompts": {"kind": "chat"}}, "never end"),
        ({"requests": 3, "arrivls": {}}, "arrivls"),
        ({"requests": 3, "trace": {"path": "x"}, "prompts": {"kind": "chat"}}, "trace brings its own"),
        ({"requests": 3, "trace": {"path": "x", "speed": 2, "rate_per_s": 1}}, "give one"),
        ({"requests": 3, "arrivals": {"process": "steps", "steps": [{"rate_per_s": 0, "for_s": 1}]}}, "nobody"),
        (
            {
                "requests": 3,
                "arrivals": {"process": "constant", "rate_per_s": 1},
                "prompts": {"kind": "plain", "prompt_tokens": {"dist": "uniform", "min": 9, "max": 3}},
            },
            "min 9 is above max 3",
        ),
        ([], "not a mapping"),
    ],
)
def test_mistakes_are_one_line(raw: object, path: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        parse(raw)
    assert path in str(mistake.value)
    assert "\n" not in str(mistake.value)


def test_a_closed_loop_has_no_times_but_content() -> None:
    w = parse({"requests": 5, "arrivals": {"process": "closed", "users": 3}, "prompts": {"kind": "chat"}})
    assert w.closed
    with pytest.raises(ConfigError):
        w.arrivals()
    source = w.source()
    assert source.next(0.0).output_tokens >= 1


segments = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=6)


def tokens_of(prompt: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(content, j) for content, n in prompt for j in range(n)]


@given(segments, segments, st.sampled_from([1, 4, 16]))
def test_block_keys_agree_exactly_where_leading_tokens_do(a: list, b: list, block: int) -> None:
    # Segments cut differently but never ambiguous: equal tokens means equal (content, offset) pairs. Adjacent
    # segments of one content id restart at offset 0, so the token lists tell them apart too.
    keys_a, keys_b = block_keys(tuple(a), block), block_keys(tuple(b), block)
    tokens_a, tokens_b = tokens_of(a), tokens_of(b)
    assert len(keys_a) == len(tokens_a) // block
    common = 0
    for x, y in zip(tokens_a, tokens_b, strict=False):
        if x != y:
            break
        common += 1
    shared = 0
    for x, y in zip(keys_a, keys_b, strict=False):
        if x != y:
            break
        shared += 1
    assert shared == common // block
    assert len(set(keys_a)) == len(keys_a)
    assert shared_tokens(tuple(a), tuple(b)) == common


@given(segments, st.integers(1, 100))
def test_cut_keeps_the_beginning(a: list, limit: int) -> None:
    short = cut(tuple(a), limit)
    assert tokens_of(list(short)) == tokens_of(a)[:limit]
    assert count_tokens(short) == min(limit, count_tokens(tuple(a)))


def test_namespaces_never_share_blocks() -> None:
    prompt = ((1, 64),)
    assert not set(block_keys(prompt, 16, 1)) & set(block_keys(prompt, 16, 2))


@pytest.mark.parametrize("kind", ["chat", "rag", "agent", "batch"])
def test_parts_of_a_workload_share_the_common_part_and_nothing_else(kind: str) -> None:
    w = workload(kind)

    def contents(part: int) -> tuple[set[int], set[int]]:
        source = w.source(part=part)
        prompts = [source.next(float(i)).prompt for i in range(50)]
        return {p[0][0] for p in prompts}, {p[-1][0] for p in prompts}

    (first_a, last_a), (first_b, last_b) = contents(0), contents(1)
    assert first_a == first_b, "the system prompt is one"
    assert not last_a & last_b, "what users write is not"

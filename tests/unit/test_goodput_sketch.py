"""Mergeable histograms whose SLO edges are exact."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from cluster.goodput.sketch import Sketch, coarse_edges, latency_edges

EDGES = latency_edges([0.3, 0.05])


def filled(values, edges=EDGES) -> Sketch:
    sketch = Sketch(edges)
    sketch.extend(values)
    return sketch


def test_a_limit_is_an_exact_edge():
    values = [0.05, 0.0500001, 0.3, math.nextafter(0.3, 1), 2.0]
    sketch = filled(values)
    assert sketch.within(0.05) == 1
    assert sketch.within(0.3) == 3
    assert sketch.within(math.inf) == 5


def test_quantiles_are_within_one_bucket_of_the_exact_ones():
    rng = random.Random(1)
    values = [rng.lognormvariate(-2, 1.2) for _ in range(20_000)]
    sketch = filled(values)
    for q in (0.01, 0.5, 0.9, 0.99, 0.999):
        assert sketch.quantile(q) == pytest.approx(float(np.quantile(values, q)), rel=0.095)
    assert sketch.quantile(0) == pytest.approx(min(values))
    assert sketch.quantile(1) == max(values)
    assert sketch.mean == pytest.approx(sum(values) / len(values))


def test_unfinished_requests_are_beyond_every_value():
    sketch = filled([0.1] * 70)
    assert sketch.quantile(0.5, infinite=30) == pytest.approx(0.1)
    assert sketch.quantile(0.95, infinite=30) == math.inf
    assert filled([]).quantile(0.5, infinite=1) == math.inf
    assert filled([]).quantile(0.5) is None


def test_merge_and_difference():
    rng = random.Random(2)
    values = [rng.expovariate(3) for _ in range(400)]
    left, right = filled(values[:150]), filled(values[150:])
    before = left.copy()
    left.merge(right)
    assert left.counts == filled(values).counts
    assert left.since(before).counts == right.counts
    assert left.since(before).count == 250
    with pytest.raises(ValueError, match="different bucket edges"):
        left.merge(Sketch(latency_edges([0.123])))


@pytest.mark.parametrize("bad", [-0.1, math.nan, math.inf])
def test_what_is_no_latency_is_refused(bad):
    with pytest.raises(ValueError, match="no latency"):
        Sketch(EDGES).add(bad)


def test_the_scrape_edges_are_edges_of_the_sketch():
    coarse = coarse_edges([0.3, 0.05])
    assert set(coarse) <= set(EDGES)
    assert 0.3 in coarse
    assert len(coarse) <= 26
    sketch = filled([0.01, 0.2, 0.31, 100])
    assert sketch.cumulative([0.05, 0.3, coarse[-1]]) == [1, 2, 4]


def test_zero_and_huge_values():
    sketch = filled([0.0, 1e6])
    assert sketch.quantile(0.0) == 0.0
    assert sketch.quantile(1.0) == 1e6
    assert sketch.cumulative(EDGES)[-1] == 1

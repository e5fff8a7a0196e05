"""The adapter to measured tables: interpolation, composition of mixed steps, and clear lines where there is nothing."""

from __future__ import annotations

import json

import pytest

from cluster.errors import UserError
from cluster.perf import aiconfigurator as aic
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import model_shape
from cluster.perf.roofline import RooflineTimes
from cluster.perf.source import step_times

QWEN, H100 = model_shape("qwen3-32b"), hardware("H100")


@pytest.fixture
def tables(tmp_path, monkeypatch) -> RooflineTimes:
    """A cache that holds the roofline's own answers as if AIConfigurator had given them."""
    truth = RooflineTimes(QWEN, H100, 4)
    answer = {
        "prefill_s": [truth.step_s([(n, c)], 0, 0) for n in aic.NEW_TOKENS for c in aic.CACHED_TOKENS],
        "decode_s": [truth.step_s((), b, b * c) for b in aic.BATCHES for c in aic.CONTEXTS],
    }
    folder = tmp_path / "aiconfigurator-tables"
    folder.mkdir()
    (folder / f"Qwen--Qwen3-32B_h100_sxm_tp4_{aic.VERSION}.json").write_text(json.dumps(answer))
    monkeypatch.setattr(aic, "cache_folder", lambda: tmp_path)
    aic._grids.cache_clear()
    return truth


def test_between_the_points_of_a_table_times_are_interpolated(tables: RooflineTimes) -> None:
    times = step_times("aiconfigurator", QWEN, H100, 4)
    for load in (([(512, 0)], 0, 0), ([(3000, 0)], 0, 0), ([(1500, 5000)], 0, 0), ((), 1, 4096), ((), 100, 425_000)):
        assert times.step_s(*load) == pytest.approx(tables.step_s(*load), rel=0.08)
    mixed = ([(512, 1024)], 32, 32 * 4000)
    assert times.step_s(*mixed) == pytest.approx(tables.step_s(*mixed), rel=0.25)
    assert times.step_s([(512, 0), (512, 0)], 0, 0) == pytest.approx(
        tables.step_s([(512, 0), (512, 0)], 0, 0), rel=0.25
    )
    assert times.transfer_s(10**9) == tables.transfer_s(10**9)


def test_more_work_never_takes_less_time_in_a_table(tables: RooflineTimes) -> None:
    times = step_times("aiconfigurator", QWEN, H100, 4)
    decode = [times.step_s((), b, b * 4000) for b in (1, 3, 10, 50, 200, 700)]
    prefill = [times.step_s([(n, 0)], 0, 0) for n in (10, 100, 1000, 10_000, 60_000)]
    assert decode == sorted(decode) and prefill == sorted(prefill)
    assert times.step_s((), 8, 8000, draft_tokens=32) >= times.step_s((), 8, 8000)


@pytest.mark.parametrize(
    ("model", "gpu", "line"),
    [
        ("llama-2-7b", "H100", "model: no AIConfigurator name is known for meta-llama/Llama-2-7b-hf"),
        ("qwen3-32b", "MI300X", "gpu: AIConfigurator has no tables for MI300X"),
    ],
)
def test_what_the_tables_do_not_know_is_one_line(model: str, gpu: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        step_times("aiconfigurator", model_shape(model), hardware(gpu))


def test_without_the_package_the_line_says_how_to_get_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(aic, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(aic.importlib.util, "find_spec", lambda _name: None)
    aic._grids.cache_clear()
    with pytest.raises(UserError, match="run `make aiconfigurator`"):
        step_times("aiconfigurator", QWEN, H100, 2)


def test_pipelines_and_other_types_go_to_the_roofline() -> None:
    with pytest.raises(UserError, match="without pipelines"):
        step_times("aiconfigurator", QWEN, H100, 2, pp=2)
    with pytest.raises(UserError, match="the model's own type"):
        step_times("aiconfigurator", QWEN, H100, 2, weight_dtype="fp8")


def test_a_corner_without_an_answer_repeats_its_neighbour() -> None:
    grid = aic.Grid((1, 10), (1, 10), [None, 2.0, 3.0, 4.0])
    assert grid(1, 1) == pytest.approx(2.0)
    with pytest.raises(UserError, match="no measurements"):
        aic.Grid((1, 10), (1, 10), [None, None, 1.0, 1.0])

"""The search: what cannot run falls out with a line, what can is rated by goodput, and levers move it the right way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.errors import UserError
from cluster.messages import Slo
from cluster.perf.hardware import hardware
from cluster.perf.model_shape import model_shape
from cluster.perf.profile import Coefficients, Profile, write_profile
from cluster.perf.source import step_times
from cluster.planner.layout import Layout, Pool, Topology, parse_topology, require_pair
from cluster.planner.rates import DecodeCurve, MixedCurve, PrefillCurve, Workload, highest_rate
from cluster.planner.topology import Planner, Question, pareto

LLAMA_70B, QWEN = model_shape("llama-3.1-70b"), model_shape("qwen3-32b")
LOAD, SLO = Workload(4000, 500), Slo(2.0, 0.040)


def _question(**changes) -> Question:
    return replace(Question(LLAMA_70B, {"H100": 16}, LOAD, SLO), **changes)


def _goodput(question: Question, text: str) -> float:
    planner = Planner(question)
    return planner.rate(parse_topology(text, list(question.gpus))).goodput_rps


def test_the_best_topologies_use_all_gpus_and_meet_the_slo() -> None:
    answer = Planner(_question()).search()
    best, split = answer.best(), answer.best("split")
    assert best is not None and split is not None and best.gpus == 16
    assert best is answer.rated[0] and answer.considered >= len(answer.rated) > 10
    for entry in answer.rated:
        assert entry.gpus <= 16
        if entry.goodput_rps > 0.01:
            assert entry.outlook.attainment >= 0.89
            assert entry.saturated_rps >= entry.goodput_rps
    assert "H100 tp1" in answer.impossible and "takes 131.4 GiB" in answer.impossible["H100 tp1"]


def test_h200_prefers_the_split_that_measured_tables_prefer() -> None:
    """AIConfigurator 0.12.0 answers 6 x prefill tp2 + 1 x decode tp4 and 10 x prefill tp1 + 3 x decode tp2."""
    best = Planner(_question(gpus={"H200": 16})).search().rated[0].topology
    assert str(best) == "P 6 x H200 tp2 + D 1 x H200 tp4"
    best = Planner(_question(shape=QWEN, gpus={"H200": 16})).search().rated[0].topology
    assert str(best) == "P 10 x H200 tp1 + D 3 x H200 tp2"


def test_a_tight_tpot_favours_the_split_and_a_loose_one_does_not() -> None:
    def ratio(tpot_s: float) -> float:
        answer = Planner(_question(gpus={"H200": 16}, slo=Slo(2.0, tpot_s))).search()
        split, colocated = answer.best("split"), answer.best("colocated")
        assert split is not None and colocated is not None
        return split.goodput_per_gpu / colocated.goodput_per_gpu

    assert ratio(0.025) > 1.15 > ratio(0.2)


@pytest.mark.parametrize("text", ["P4tp2+D2tp4", "C4tp4", "C4tp4@512"])
def test_looser_limits_and_faster_hardware_never_lower_goodput(text: str) -> None:
    base = _goodput(_question(), text)
    assert base > 0
    assert _goodput(_question(slo=Slo(3.0, 0.040)), text) >= base
    assert _goodput(_question(slo=Slo(2.0, 0.060)), text) >= base
    assert _goodput(_question(gpus={"H200": 16}), text) >= base
    assert _goodput(_question(load=Workload(4000, 500, 2000)), text) >= base
    assert _goodput(_question(attainment=0.99), text) <= base


def test_more_replicas_of_both_pools_serve_at_least_twice_as_much() -> None:
    question = _question(gpus={"H100": 32})
    assert _goodput(question, "P8tp2+D4tp4") >= 2 * _goodput(question, "P4tp2+D2tp4")


def test_a_slow_link_is_named_as_the_bottleneck() -> None:
    planner = Planner(_question(link="tcp", slo=Slo(1.2, 0.040)))
    rated = planner.rate(parse_topology("P4tp2+D2tp4", ["H100"]))
    fast = Planner(_question(slo=Slo(1.2, 0.040))).rate(parse_topology("P4tp2+D2tp4", ["H100"]))
    assert rated.goodput_rps < fast.goodput_rps
    nothing = Planner(_question(link="tcp", load=Workload(40_000, 50), slo=Slo(20.0, 0.040)))
    assert nothing.rate(parse_topology("P6tp2+D1tp4", ["H100"])).goodput_rps < 1.5


def test_an_unwanted_pause_rules_out_whole_prompts_but_not_chunks() -> None:
    question = _question(itl_max_s=0.1)
    assert _goodput(question, "C4tp4") == 0
    assert _goodput(question, "C4tp4@512") > 0


def test_two_gpu_types_are_split_by_phase_and_priced() -> None:
    answer = Planner(_question(gpus={"H100": 8, "A100-80G": 8})).search()
    mixed = [e for e in answer.rated if len(e.topology.gpus_by_type()) == 2]
    assert any(e.topology.kind == "split" for e in mixed)
    by_dollar = max(answer.rated, key=lambda e: e.requests_per_dollar)
    assert by_dollar.topology.prefill is not None and by_dollar.topology.prefill.layout.gpu == "H100"
    assert by_dollar.price_per_hour == pytest.approx(
        sum({"H100": 3.0, "A100-80G": 1.3}[g] * n for g, n in by_dollar.topology.gpus_by_type().items())
    )


def test_no_entry_of_the_front_is_beaten() -> None:
    rated = Planner(_question()).search().rated
    front = pareto(rated)
    for a in front:
        assert not any(
            b.outlook.tpot_s < a.outlook.tpot_s and b.tokens_per_s_per_gpu > a.tokens_per_s_per_gpu for b in rated
        )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"gpus": {"H100": 1}}, "weights: meta-llama/Llama-3.1-70B in bfloat16 takes 131.4 GiB"),
        ({"slo": Slo(0.01, 0.04)}, "slo.ttft: 10 ms cannot be met at any rate: an idle H100 tp8 takes"),
        ({"slo": Slo(2.0, 0.001)}, "slo.tpot: 1 ms cannot be met at any rate"),
        ({"load": Workload(200_000, 500)}, "prompt: 200500 tokens with the output are above the 131072"),
        ({"gpus": {"H1000": 1}}, "gpu: 'H1000' is not in the hardware table"),
        ({"times": "guess"}, "times: 'guess' is not known"),
    ],
)
def test_what_cannot_be_is_one_line(changes, line: str) -> None:
    with pytest.raises(UserError) as caught:
        Planner(_question(**changes)).search()
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_profile_rates_only_the_layout_it_was_measured_at(tmp_path) -> None:
    path = tmp_path / "p.json"
    write_profile(Profile(Coefficients(5e-3, 2e-5, 0.0, 1e-4, 1e-8), {"tp": 4, "pp": 1}), path)
    answer = Planner(_question(shape=QWEN, times="profile", profile=str(path))).search()
    assert {pool.layout.tp for entry in answer.rated for pool in entry.topology.pools} == {4}
    assert answer.impossible["H100 tp8"] == (
        f"profile: {path} was measured at tp=4 pp=1, not tp=8 pp=1; use that layout or the roofline's times"
    )
    write_profile(Profile(Coefficients(5e-3, 2e-5, 0.0, 1e-4, 1e-8)), path)
    assert step_times("profile", QWEN, hardware("H100"), 8, profile=str(path)).step_s((), 1, 0) > 0


def test_replicated_heads_cannot_go_to_a_narrower_decode_group() -> None:
    few_heads = replace(QWEN, kv_heads=2)
    with pytest.raises(UserError, match=r"prefill has 4, decode has 2; .* copies of 2 KV heads; use at most tp 2"):
        require_pair(few_heads, Layout("H100", 4), Layout("H100", 2))
    require_pair(few_heads, Layout("H100", 2), Layout("H100", 4))
    require_pair(QWEN, Layout("H100", 4), Layout("H100", 2))
    with pytest.raises(UserError, match=r"pp: prefill has 2, decode has 1; .*use pp 1 in a split"):
        require_pair(QWEN, Layout("H100", 2, 2), Layout("H100", 4))
    planner = Planner(_question(shape=few_heads))
    with pytest.raises(UserError, match="cannot gather from 4 ranks"):
        planner.search(only=parse_topology("P2tp4+D4tp2", ["H100"]))
    assert not any(
        e.topology.prefill and e.topology.decode and e.topology.prefill.layout.tp > max(2, e.topology.decode.layout.tp)
        for e in planner.search().rated
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("P4tp2", "needs one P and one D pool"),
        ("P4tp2+P1tp2", "'P1tp2' is not a pool"),
        ("four", "'four' is not a pool"),
        ("P4tp2:B200+D1tp8", "'B200' is not among"),
        ("P4tp2@512+D1tp8", "chunks belong"),
    ],
)
def test_a_topology_that_does_not_read_like_one_is_one_line(text: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        parse_topology(text, ["H100"])


def test_a_topology_reads_back() -> None:
    assert parse_topology("P4tp2+D1tp4pp2:A100-80G", ["H100", "A100-80G"]) == Topology(
        Pool(Layout("H100", 2), 4), Pool(Layout("A100-80G", 4, 2), 1)
    )
    assert parse_topology("C2tp8@512", ["H100"]).chunk_tokens == 512
    with pytest.raises(UserError, match="takes 32 H100, there are 16"):
        Planner(_question()).search(only=parse_topology("C4tp8", ["H100"]))


def test_at_a_trickle_latencies_are_the_service_times() -> None:
    question = _question()
    planner = Planner(question)
    layout = Layout("H100", 4)
    times = planner.times(layout)
    assert PrefillCurve(times, LOAD).latency_s == times.step_s([(4000, 0)], 0, 0)
    whole = MixedCurve(times, LOAD, planner.room(layout)).outlook(1e-6, SLO)
    assert whole.ttft_s == pytest.approx(times.step_s([(4000, 0)], 0, 0), rel=0.05)
    assert whole.tpot_s == pytest.approx(times.step_s((), 1, 4250), rel=0.01)


def test_little_s_law_holds_along_the_decode_curve() -> None:
    planner = Planner(_question())
    layout = Layout("H100", 4)
    curve = DecodeCurve(planner.times(layout), LOAD, planner.room(layout))
    for rate in (0.1, 1.0, 2.0):
        batch = curve.batch(rate)
        assert batch == pytest.approx(rate * 500 * curve.step_s(batch), rel=0.02)
    cap = curve.cap(0.040)
    assert curve.step_s(cap) <= 0.040 < curve.step_s(cap + 1)


def test_the_highest_rate_is_found() -> None:
    assert highest_rate(lambda r: 1.0 if r <= 7.5 else 0.5, 0.9) == pytest.approx(7.5, rel=0.003)
    assert highest_rate(lambda r: 0.0, 0.9) == 0.0


@pytest.mark.parametrize("text", ["P2tp1+D2tp1", "P3tp1+D1tp1"])
def test_the_longest_step_binds_a_split_too(text: str) -> None:
    """A decode batch grows until its step is as long as allowed, be it by TPOT or by the longest step."""
    free = _question(shape=model_shape("llama-3.1-8b"), gpus={"H100": 4}, load=Workload(2000, 300))
    topology = parse_topology(text, ["H100"])
    rated = [Planner(replace(free, itl_max_s=limit)).rate(topology) for limit in (None, 1.0, 0.012, 0.009)]
    goodput = [entry.goodput_rps for entry in rated]
    assert goodput[0] == goodput[1] > goodput[2] > goodput[3] > 0
    assert [entry.saturated_rps for entry in rated] == sorted((e.saturated_rps for e in rated), reverse=True)
    assert rated[0].outlook.itl_max_s > 0.012
    for entry, limit in ((rated[2], 0.012), (rated[3], 0.009)):
        assert entry.outlook.itl_max_s <= limit and entry.outlook.bottleneck == "longest step"
    assert "longest step" not in rated[0].outlook.limits


def test_a_longest_step_that_no_engine_keeps_is_named() -> None:
    with pytest.raises(UserError, match=r"^itl-max-ms: 1 ms cannot be met at any rate: an idle H100 tp8 takes"):
        Planner(_question(itl_max_s=0.001)).search()
    best = Planner(_question(itl_max_s=0.03)).search().best()
    assert best is not None and best.outlook.itl_max_s <= 0.03

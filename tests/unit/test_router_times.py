"""Whom a finished request teaches: the engines that did the work, nobody else."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.messages import Outcome, Path, RequestRecord, Role, Slo, Stage, WorkerInfo
from cluster.perf.times import LinearTimes
from router.times import WorkerTimes

PRIOR = LinearTimes()
PROMPT_TOKENS = 1000
KV_BYTES = 10_000_000


def info(name: str, role: Role, tp: int = 1, accelerator: str | None = None) -> WorkerInfo:
    return WorkerInfo(name, "i", role, 16, 1000, 1024, 64, 2048, 4096, tp=tp, accelerator_type=accelerator)


def prompt_s(times: Any) -> float:
    return times.step_s([(PROMPT_TOKENS, 0)], 0, 0)


def split(number: int, compute_s: float, **changes: Any) -> RequestRecord:
    record = RequestRecord(f"s{number}", Outcome.DONE, Slo(1, 0.1), number, number + 1.0, prompt_tokens=PROMPT_TOKENS)
    record.path, record.prefill_worker, record.decode_worker = Path.SPLIT, "p", "d"
    record.stage_s = {Stage.PREFILL_COMPUTE: compute_s, Stage.KV_TRANSFER: 0.2}
    record.transfer_bytes = KV_BYTES
    for name, value in changes.items():
        setattr(record, name, value)
    return record


def local(number: int, compute_s: float) -> RequestRecord:
    stage_s = {Stage.PREFILL_COMPUTE: compute_s}
    return split(number, 0.0, path=Path.LOCAL_SHORT, prefill_worker=None, transfer_bytes=0, stage_s=stage_s)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [(info("p", Role.PREFILL, tp=8), info("d", Role.DECODE)),
     (info("p", Role.PREFILL, accelerator="H200"), info("d", Role.DECODE, accelerator="L40S"))],
)  # fmt: skip
def test_a_decode_pool_of_another_kind_learns_its_own_prompts_and_its_transfers(
    prefill: WorkerInfo, decode: WorkerInfo
) -> None:
    times = WorkerTimes(PRIOR)
    of_prefill, of_decode = times.of(prefill), times.of(decode)
    for i in range(40):
        times.observe(split(i, 0.005))
    assert prompt_s(of_prefill) == pytest.approx(0.005, rel=0.05)
    assert prompt_s(of_decode) == prompt_s(PRIOR)
    assert of_decode.transfer_s(KV_BYTES) == pytest.approx(0.2, rel=0.05)
    assert of_prefill.transfer_s(KV_BYTES) == PRIOR.transfer_s(KV_BYTES)
    for i in range(40, 80):
        times.observe(split(i, 0.005))
        times.observe(local(i, 0.04))
    assert prompt_s(of_prefill) == pytest.approx(0.005, rel=0.05)
    assert prompt_s(of_decode) == pytest.approx(0.04, rel=0.05)


def test_equal_decode_engines_learn_from_the_prompts_of_the_prefill_pool() -> None:
    """They compute few themselves, and none at all where a mere guess calls them slow."""
    times = WorkerTimes(PRIOR)
    of_prefill, of_decode = times.of(info("p", Role.PREFILL)), times.of(info("d", Role.DECODE))
    assert of_prefill is not of_decode
    for i in range(40):
        times.observe(split(i, 0.005))
    assert prompt_s(of_decode) == pytest.approx(0.005, rel=0.05)
    for i in range(40, 140):
        times.observe(local(i, 0.04))
    assert prompt_s(of_decode) == pytest.approx(0.04, rel=0.05)
    assert prompt_s(of_prefill) == pytest.approx(0.005, rel=0.05), (
        "they step between decodes, a prefill engine does not"
    )


def test_one_token_is_served_by_the_prefill_engine_alone() -> None:
    times = WorkerTimes(PRIOR)
    of_prefill, of_decode = times.of(info("p", Role.PREFILL, tp=8)), times.of(info("d", Role.DECODE))
    for i in range(40):
        times.observe(split(i, 0.005, stage_s={Stage.PREFILL_COMPUTE: 0.005}, transfer_bytes=0))
    assert prompt_s(of_prefill) == pytest.approx(0.005, rel=0.05)
    assert prompt_s(of_decode) == prompt_s(PRIOR)


def test_a_request_that_moved_teaches_nobody() -> None:
    """Its record names the last engines, its stages were measured on the first."""
    times = WorkerTimes(PRIOR)
    both = times.of(info("p", Role.PREFILL)), times.of(info("d", Role.DECODE))
    for i in range(40):
        times.observe(split(i, 0.005, migrations=1))
    for model in both:
        assert prompt_s(model) == prompt_s(PRIOR)
        assert model.transfer_s(KV_BYTES) == PRIOR.transfer_s(KV_BYTES)


def test_requests_without_an_engine_and_engines_that_nobody_knows_teach_nothing() -> None:
    times = WorkerTimes(PRIOR)
    model = times.of(info("d", Role.DECODE))
    times.observe(split(1, 0.005, prefill_worker=None, decode_worker=None, path=None))
    times.observe(split(2, 0.005, prefill_worker="gone", decode_worker="gone too"))
    assert prompt_s(model) == prompt_s(PRIOR)

"""Step times of the workers a router knows: one learning model per kind of engine, fed by finished requests."""

from __future__ import annotations

from cluster.messages import RequestRecord, WorkerInfo
from cluster.perf.online import OnlineTimes
from cluster.perf.times import LinearTimes, StepTimes


class WorkerTimes:
    """Equal engines of a pool share one model, so a new replica starts with what the others have taught."""

    def __init__(self, prior: StepTimes | None = None) -> None:
        self._prior = prior or LinearTimes()
        self._models: dict[tuple[object, ...], OnlineTimes] = {}
        self._of_worker: dict[str, OnlineTimes] = {}

    def of(self, info: WorkerInfo) -> StepTimes:
        key = (info.role, info.tp, info.pp, info.accelerator_type)
        model = self._models.setdefault(key, OnlineTimes(self._prior))
        self._of_worker[info.worker_id] = model
        return model

    def observe(self, record: RequestRecord) -> None:
        """A prompt teaches the model of the engine that computed it, a transfer the one that pulled."""
        models = {self._of_worker.get(w) for w in (record.prefill_worker, record.decode_worker) if w is not None}
        if record.prefill_worker is not None and record.decode_worker is not None:
            computed_by = self._of_worker.get(record.prefill_worker)
            pulled_by = self._of_worker.get(record.decode_worker)
            models = {computed_by, pulled_by}
        for model in models:
            if model is not None:
                model.observe(record, record.end_s)

"""Step times of the workers a router knows: one learning model per kind of engine, fed by finished requests."""

from __future__ import annotations

from cluster.messages import RequestRecord, Role, WorkerInfo
from cluster.perf.online import OnlineTimes
from cluster.perf.times import LinearTimes, StepTimes


class WorkerTimes:
    """Equal engines of a pool share one model, so a new replica starts with what the others have taught."""

    def __init__(self, prior: StepTimes | None = None) -> None:
        self._prior = prior or LinearTimes()
        self._models: dict[tuple[object, ...], OnlineTimes] = {}
        self._kinds: dict[str, tuple[object, ...]] = {}

    def of(self, info: WorkerInfo) -> StepTimes:
        kind = (info.role, info.tp, info.pp, info.accelerator_type)
        self._kinds[info.worker_id] = kind
        return self._models.setdefault(kind, OnlineTimes(self._prior))

    def observe(self, record: RequestRecord) -> None:
        """A prompt teaches the model of the engine that computed it, a transfer that of the engine that pulled.

        A prefill engine's prompt also teaches a decode pool of the same layout and accelerator: a prompt costs as much
        there, and one computed between decode steps tells it less well. Any other decode pool has a speed of its own.

        A request that moved after its first token names the engines that ended it, while its stages are from those that
        began it. It teaches nothing.
        """
        if record.migrations:
            return
        computed_by = self._kinds.get(record.prefill_worker or record.decode_worker or "")
        if computed_by is not None:
            for kind in {computed_by, (Role.DECODE, *computed_by[1:])}:
                if (model := self._models.get(kind)) is not None:
                    model.observe_prompt(record, record.end_s)
        pulled_by = self._kinds.get(record.decode_worker or "")
        if pulled_by is not None:
            self._models[pulled_by].observe_transfer(record, record.end_s)

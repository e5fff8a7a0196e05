"""One place that turns `--times roofline|profile|aiconfigurator` into a `StepTimes` for a layout."""

from __future__ import annotations

from cluster.errors import UserError
from cluster.perf.hardware import Hardware, Link
from cluster.perf.model_shape import ModelShape
from cluster.perf.profile import read_profile
from cluster.perf.roofline import RooflineTimes
from cluster.perf.times import StepTimes

SOURCES = ("roofline", "profile", "aiconfigurator")


def step_times(
    source: str,
    shape: ModelShape,
    device: Hardware,
    tp: int = 1,
    pp: int = 1,
    weight_dtype: str | None = None,
    kv_dtype: str | None = None,
    profile: str | None = None,
    transfer: Link | None = None,
) -> StepTimes:
    """Step times of one replica.

    Raises:
        UserError: the source is unknown, lacks its file or package, or cannot describe this layout.
    """
    if source == "roofline":
        return RooflineTimes(shape, device, tp, pp, weight_dtype, kv_dtype, transfer)
    if source == "profile":
        if profile is None:
            raise UserError("profile: --times profile needs --profile FILE; write one with `pdserve fit`")
        return read_profile(profile, tp, pp).times()
    if source == "aiconfigurator":
        from cluster.perf.aiconfigurator import aiconfigurator_times

        if pp > 1:
            raise UserError(f"pp: {pp}: AIConfigurator's tables are used without pipelines here; use --times roofline")
        if weight_dtype not in (None, shape.dtype) or kv_dtype is not None:
            raise UserError("weights: AIConfigurator's tables are used in the model's own type; use --times roofline")
        return aiconfigurator_times(shape, device, tp)
    raise UserError(f"times: {source!r} is not known; use one of {', '.join(SOURCES)}")

"""What a simulated engine reads of sampling parameters, without the library that defines them.

A leg's parameters travel to the engine's process. vLLM's own class would make that process import vLLM, which takes
seconds and half a gigabyte, for a handful of integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PlainSampling:
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    all_stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


def plain(sampling: Any) -> PlainSampling | None:
    """From any object with these attributes; None (a prefill leg) stays None."""
    if sampling is None:
        return None
    return PlainSampling(
        max_tokens=getattr(sampling, "max_tokens", None),
        min_tokens=getattr(sampling, "min_tokens", 0) or 0,
        ignore_eos=bool(getattr(sampling, "ignore_eos", False)),
        stop_token_ids=tuple(getattr(sampling, "stop_token_ids", None) or ()),
        all_stop_token_ids=tuple(sorted(getattr(sampling, "all_stop_token_ids", None) or ())),
        logprobs=getattr(sampling, "logprobs", None),
    )

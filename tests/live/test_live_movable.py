"""Which generations another engine can go on with: vLLM's own parameters; no engine runs. Kind: retry in mid-stream."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("default")]


def test_what_an_engine_looks_for_in_the_output_alone_cannot_move() -> None:
    from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams

    from cluster.engine.vllm.serving import is_movable

    movable: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7, "top_p": 0.9, "logprobs": 3, "stop": ["x"], "min_tokens": 2},
        {"bad_words": []},
    ]
    bound: list[dict[str, Any]] = [
        {"n": 2},
        {"seed": 1},
        {"presence_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
        {"bad_words": ["two words"]},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)},
    ]
    assert [is_movable(SamplingParams(**more)) for more in movable] == [True] * len(movable)
    assert [is_movable(SamplingParams(**more)) for more in bound] == [False] * len(bound)

"""One vLLM engine in a process of its own, driven by lines of JSON. A tool of the live tests, not a test.

    python tests/support/bare_engine.py '{"role": "prefill", "cores": "0", ...}'

stdin: {"prompt": [ids], "max_tokens": n, "ignore_eos": bool, "params": kv_transfer_params}; the last two are
optional; an empty line ends the engine.
stdout: one line when ready, one per request: {"tokens": [...], "params": {...}, "cached": n}.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any


def main() -> None:
    options = json.loads(sys.argv[1])
    os.environ.update(options["environment"])
    # Progress and warnings of the engine go to stderr; stdout carries the answers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    asyncio.run(serve(options, answers))


async def serve(options: dict[str, Any], answers: Any) -> None:
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = options["kv_transfer_config"]
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **options["engine_args"],
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            enforce_eager=True,
        )
    )

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    say({"ready": True})
    for number in range(1_000_000):
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line.strip():
            break
        order = json.loads(line)
        extra = {"kv_transfer_params": order["params"]} if order.get("params") else None
        sampling = SamplingParams(
            temperature=0,
            max_tokens=order["max_tokens"],
            ignore_eos=order.get("ignore_eos", False),
            extra_args=extra,
        )
        last = None
        async for output in engine.generate({"prompt_token_ids": order["prompt"]}, sampling, f"r{number}"):
            last = output
        assert last is not None
        say(
            {
                "tokens": list(last.outputs[0].token_ids),
                "params": last.kv_transfer_params,
                "cached": last.num_cached_tokens,
            }
        )
    engine.shutdown()


if __name__ == "__main__":
    main()

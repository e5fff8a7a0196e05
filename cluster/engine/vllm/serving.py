"""vLLM's OpenAI server on a cluster instead of an engine.

`ServingClient` is an `EngineClient`: vLLM's own layer above it (chat, completions, responses, tools, logprobs,
structured output, error shapes) is used as it is. Below it a subclass runs `Generation`s on the pools. The
detokenizer, stop strings and logprob texts live here, once, whichever engine a token comes from.
"""

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.renderers import renderer_from_config
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from cluster.engine.base import EngineDelta
from cluster.engine.vllm.outputs import from_delta
from cluster.engine.vllm.sampling import continued
from cluster.errors import BadRequest, PdserveError, RequestError

SUPPORTED_TASKS: tuple[Any, ...] = ("generate",)


@dataclass(slots=True, eq=False)
class Generation:
    """One request of a client, checked and tokenized.

    Attributes:
        request_id: minted here; engine ids of its legs derive from it.
        sampling: parameters of each choice; `n` of them.
        streaming: whether tokens reach the client before the end.
        movable: whether another engine can continue after tokens were sent.
        whole_prompt: the client wants the prompt's log probabilities: only an engine that computes all of it has them.
        tokens: output tokens of each choice that the client has been given.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: list[SamplingParams]
    cache_salt: str | None
    priority: int
    lora: Any
    trace_headers: Mapping[str, str] | None
    streaming: bool
    movable: bool
    whole_prompt: bool
    core_ids: list[str] = field(default_factory=list)
    client_id: str = ""
    collector: Any = None
    parent: Any = None
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def n(self) -> int:
        return len(self.sampling)

    @property
    def max_output_tokens(self) -> int:
        return self.sampling[0].max_tokens or 1

    def leg(self, choice: int, tokens_sent: int) -> tuple[list[int], SamplingParams]:
        """Prompt and parameters of a decode leg that continues after `tokens_sent` output tokens."""
        if tokens_sent == 0:
            return self.prompt_token_ids, self.sampling[choice].clone()
        sent = self.tokens[choice][:tokens_sent]
        return [*self.prompt_token_ids, *sent], continued(self.sampling[choice], len(sent))


class ServingClient(EngineClient):
    """What vLLM's OpenAI layer talks to.

    Args:
        vllm_config: of an engine of the pools; describes the model. No engine is started from it.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.renderer = renderer_from_config(vllm_config)
        self.input_processor = InputProcessor(vllm_config, self.renderer)
        self.output_processor = OutputProcessor(self.renderer.tokenizer, log_stats=False, stream_interval=1)
        self._counter = 0

    # What a subclass does with the pools

    @abstractmethod
    def submit(self, generation: Generation) -> None:
        """Start it; output comes back through `deliver`, the end through `finish`."""

    @abstractmethod
    def refused(self, error: BadRequest) -> None:
        """A request is not submitted, and whoever streams its answer may have to say why."""

    @abstractmethod
    def withdraw(self, generation: Generation) -> None:
        """The client has left."""

    @abstractmethod
    def mint_id(self) -> str:
        """A request id that no other router has."""

    # Output from the pools

    def deliver(self, batch: list[tuple[Generation, int, EngineDelta, int | None]]) -> list[tuple[Generation, int]]:
        """Hand new tokens of many requests to their clients.

        Args:
            batch: (generation, choice, delta, cached prompt tokens or None).

        Returns:
            Choices that a stop string has ended; their legs still run.
        """
        outputs = []
        by_core_id: dict[str, tuple[Generation, int]] = {}
        for generation, choice, delta, cached in batch:
            core_id = generation.core_ids[choice]
            generation.tokens[choice].extend(delta.token_ids)
            by_core_id[core_id] = (generation, choice)
            outputs.append(from_delta(core_id, delta, len(generation.prompt_token_ids), cached))
        processed = self.output_processor.process_outputs(outputs)
        return [by_core_id[core_id] for core_id in processed.reqs_to_abort]

    def restart(self, generation: Generation, choice: int) -> None:
        """Forget output of a choice that no client has seen; it will be computed again."""
        core_id = generation.core_ids[choice]
        if not generation.tokens[choice]:
            return
        generation.tokens[choice] = []
        if self.output_processor.request_states.get(core_id) is not None:
            self.output_processor.abort_requests([core_id], internal=True)
            generation.collector.get_nowait()  # the abort's own output
        if generation.parent is not None:
            generation.parent.child_requests.add(core_id)
        self.output_processor.add_request(
            self._core_request(generation, choice), None, generation.parent, choice, generation.collector
        )

    def finish(self, generation: Generation, error: PdserveError | None, finish_reason: str | None) -> None:
        """The end of a request that its engines did not announce themselves."""
        if error is not None:
            generation.collector.put(as_vllm_error(error))
        elif finish_reason is not None:
            delta = EngineDelta(token_ids=[], finish_reason=finish_reason)
            self.deliver([(generation, choice, delta, None) for choice in range(generation.n)])

    # EngineClient

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **_: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            generation = self._generation(
                prompt,
                sampling_params,
                request_id,
                prompt_text,
                lora_request,
                tokenization_kwargs,
                trace_headers,
                priority,
            )
        except (VLLMClientError, ValueError) as e:
            self.refused(BadRequest(str(e)))
            raise
        finished = False
        try:
            self.submit(generation)
            while not finished:
                output = generation.collector.get_nowait() or await generation.collector.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.withdraw(generation)
                self.output_processor.abort_requests([generation.request_id], internal=True)
                self.output_processor.abort_requests(generation.core_ids, internal=True)

    def _generation(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        client_id: str,
        prompt_text: str | None,
        lora_request: Any,
        tokenization_kwargs: dict[str, Any] | None,
        trace_headers: Mapping[str, str] | None,
        priority: int,
    ) -> Generation:
        minted = self.mint_id()
        core = self.input_processor.process_inputs(
            minted,
            prompt,
            sampling_params,
            supported_tasks=SUPPORTED_TASKS,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
        )
        core.external_req_id = client_id
        core.request_id = minted
        params = core.sampling_params
        assert params is not None
        if core.prompt_token_ids is None or core.prompt_embeds is not None:
            raise VLLMValidationError("prompt embeddings are not supported by a split cluster", parameter="prompt")
        if core.mm_features:
            # Legs carry token ids alone: engines would answer without having seen them.
            raise VLLMValidationError("images, audio and video are not supported by a cluster", parameter="messages")
        drop_client_transfer(params)
        text = prompt.get("prompt") if isinstance(prompt, dict) else None
        generation = Generation(
            request_id=minted,
            prompt_token_ids=core.prompt_token_ids,
            sampling=[],
            cache_salt=core.cache_salt,
            priority=priority,
            lora=lora_request,
            trace_headers=trace_headers,
            streaming=params.output_kind != RequestOutputKind.FINAL_ONLY,
            movable=is_movable(params),
            whole_prompt=params.prompt_logprobs is not None,
            collector=RequestOutputCollector(params.output_kind, minted),
        )
        parent = generation.parent = ParentRequest(core) if params.n > 1 else None
        generation.client_id = client_id
        for index in range(params.n):
            core_id, child_params = parent.get_child_info(index) if parent else (minted, params)
            generation.core_ids.append(core_id)
            generation.sampling.append(child_params)
            generation.tokens.append([])
            child = self._core_request(generation, index)
            self.output_processor.add_request(child, prompt_text or text, parent, index, generation.collector)
        return generation

    @staticmethod
    def _core_request(generation: Generation, choice: int) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=generation.core_ids[choice],
            prompt_token_ids=generation.prompt_token_ids,
            mm_features=None,
            sampling_params=generation.sampling[choice],
            pooling_params=None,
            arrival_time=0.0,
            lora_request=generation.lora,
            cache_salt=generation.cache_salt,
            data_parallel_rank=None,
            external_req_id=generation.client_id,
        )

    @property
    def is_running(self) -> bool:
        return True

    @property
    def is_stopped(self) -> bool:
        return False

    @property
    def errored(self) -> bool:
        return False

    @property
    def dead_error(self) -> BaseException:
        return RequestError("no engine is ready")

    async def get_supported_tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return SUPPORTED_TASKS

    async def abort(self, request_id: Any) -> None:
        """Clients' ids are not ours; a request ends when its generator is closed."""

    async def notify_kv_transfer_request_rejected(self, request_id: str, kv_transfer_params: Any, **_: Any) -> None:
        """Clients' transfer parameters are dropped, so there is nothing to release."""

    async def is_tracing_enabled(self) -> bool:
        return False

    async def do_log_stats(self) -> None:
        """Metrics are exported elsewhere."""

    async def check_health(self) -> None:
        """A router is healthy while it answers; the pools have their own checks."""

    async def reset_mm_cache(self) -> None:
        self.renderer.clear_mm_cache()

    def shutdown(self, timeout: float | None = None) -> None:
        self.renderer.shutdown()

    async def add_lora(self, lora_request: Any) -> bool:
        return True  # engines load an adapter with the first request that names it

    def _refuse(self, what: str) -> Any:
        raise GracefulHTTPError(f"{what} is not offered by a cluster endpoint", HTTPStatus.NOT_IMPLEMENTED)

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("pooling")

    async def start_profile(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("profiling")

    async def stop_profile(self) -> None:
        self._refuse("profiling")

    async def reset_encoder_cache(self) -> None:
        self._refuse("resetting the encoder cache")

    async def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        self._refuse("resetting the prefix cache")
        return False

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        self._refuse("sleep")

    async def release_kv_cache_memory(self) -> None:
        self._refuse("releasing KV memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        self._refuse("sleep")
        return False

    async def is_sleeping(self) -> bool:
        return False

    async def pause_generation(self, **kwargs: Any) -> None:
        self._refuse("pausing")

    async def resume_generation(self) -> None:
        self._refuse("pausing")

    async def is_paused(self) -> bool:
        return False


def is_movable(params: SamplingParams) -> bool:
    """Whether prompt + tokens sent is the whole state of a generation.

    It is not with a grammar (its state is lost), a seed (its generator has advanced), several choices, penalties (they
    count output tokens apart from the prompt's), or words and repetitions that are looked for in the output alone.
    """
    return (
        params.n == 1
        and params.structured_outputs is None
        and params.seed is None
        and not params.presence_penalty
        and not params.frequency_penalty
        and (params.repetition_penalty or 1.0) == 1.0
        and params.prompt_logprobs is None
        and not params.bad_words
        and params.repetition_detection is None
    )


def drop_client_transfer(params: SamplingParams) -> None:
    """A client's own transfer parameters never reach an engine."""
    if params.extra_args and "kv_transfer_params" in params.extra_args:
        params.extra_args = {k: v for k, v in params.extra_args.items() if k != "kv_transfer_params"} or None


def as_vllm_error(error: PdserveError) -> Exception:
    """Ours to the one that vLLM's layer turns into an OpenAI error object with the right status."""
    if isinstance(error, BadRequest):
        return VLLMValidationError(error.message)
    status = HTTPStatus(error.status) if error.status in set(HTTPStatus) else HTTPStatus.INTERNAL_SERVER_ERROR
    return GracefulHTTPError(str(error), status)


async def build_openai_app(client: ServingClient, arguments: list[str]) -> Any:
    """vLLM's FastAPI application on this client.

    Args:
        arguments: of vLLM's OpenAI server, e.g. ["--model", path, "--enable-auto-tool-choice", ...].
    """
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    args = server_arguments(arguments)
    app = build_app(args, SUPPORTED_TASKS, client.model_config)
    await init_app_state(client, app.state, args, SUPPORTED_TASKS)
    return app


def server_arguments(arguments: list[str]) -> Namespace:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)  # type: ignore[no-untyped-call]
    if args.served_model_name is None:
        args.served_model_name = [args.model]
    return args


def describe_model(arguments: dict[str, Any]) -> Any:
    """The vLLM configuration of the model, without an engine."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(**arguments).create_engine_config()

"""What requests ask: prompt structures that share prefixes the way real applications do.

A structure is a stateful source: `next(at_s)` gives the next request's prompt, output length and session. It does
not choose when requests arrive (processes.py), so an open loop stays exactly the process that was asked for: a
chat turn that arrives continues the conversation that has waited longest past its pause, or opens a new one.
"""

from __future__ import annotations

import heapq
from bisect import bisect
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import Annotated, Literal, NamedTuple, Protocol

from pydantic import Field

from cluster.config import Section
from cluster.workload.arrival import Prompt, count_tokens
from cluster.workload.blocks import mix64
from cluster.workload.lengths import Length, LogNormal, fixed


class Content(NamedTuple):
    """A request without its time."""

    prompt: Prompt
    output_tokens: int
    session: int = 0


class Source(Protocol):
    def next(self, at_s: float) -> Content: ...


class Ids:
    """Content ids of one stream of one seed: disjoint from every other stream's with near certainty.

    A rerun with another seed therefore never meets the KV that an earlier run left in a live cluster's cache.
    """

    def __init__(self, seed: int, stream: int) -> None:
        self._next = mix64(seed * 1_000_003 + stream) >> 3  # below 2^61, where an integer is its own hash

    def new(self) -> int:
        self._next += 1
        return self._next

    def branch(self, part: int) -> None:
        """Continue in a range of `part`'s own: what was drawn so far stays common to all parts of a workload."""
        self._next = mix64(self._next + part) >> 3


def _zipf(n: int, exponent: float) -> list[float]:
    """Cumulative weights of ranks 1..n, weight rank^-exponent."""
    return list(accumulate((rank + 1) ** -exponent for rank in range(n)))


def _pick(cumulative: list[float], rng: Random) -> int:
    return bisect(cumulative, rng.random() * cumulative[-1], hi=len(cumulative) - 1)


def _log(mean: float, sigma: float, low: int, high: int) -> LogNormal:
    return LogNormal(dist="lognormal", mean=mean, sigma=sigma, min=low, max=high)


class Plain(Section):
    """Independent prompts; the first `shared_tokens` of each come from one of `groups` common prefixes."""

    kind: Literal["plain"]
    prompt_tokens: Length = fixed(512)
    output_tokens: Length = fixed(64)
    shared_tokens: int = Field(0, ge=0)
    groups: int = Field(1, ge=1)

    def source(self, ids: Ids, rng: Random) -> Source:
        prefixes = [ids.new() for _ in range(self.groups)]

        class _Plain:
            def next(_, at_s: float) -> Content:
                total = self.prompt_tokens.sample(rng)
                shared = min(self.shared_tokens, total)
                head: Prompt = ((prefixes[rng.randrange(self.groups)], shared),) if shared else ()
                tail: Prompt = ((ids.new(), total - shared),) if total > shared else ()
                return Content(head + tail, self.output_tokens.sample(rng))

        return _Plain()


class Chat(Section):
    """Conversations under a shared system prompt; turn k repeats everything said before it.

    The assistant's earlier answers are in the prompt with the length that was asked for. A conversation pauses
    `think_s` (mean, exponential) between arrivals and ends after its turns or before `max_prompt_tokens`.
    """

    kind: Literal["chat"]
    system_tokens: Length = fixed(400)
    system_prompts: int = Field(1, ge=1)
    turns: Length = _log(4, 0.7, 1, 40)
    user_tokens: Length = _log(120, 0.9, 4, 4000)
    output_tokens: Length = _log(250, 0.7, 8, 2000)
    think_s: float = Field(20.0, ge=0)
    max_prompt_tokens: int = Field(32_000, ge=1)

    def source(self, ids: Ids, rng: Random) -> Source:
        return _ChatSource(self, ids, rng)


@dataclass(slots=True)
class _Conversation:
    session: int
    prompt: Prompt
    turns_left: int


class _ChatSource:
    def __init__(self, spec: Chat, ids: Ids, rng: Random) -> None:
        self.spec, self.ids, self.rng = spec, ids, rng
        self.systems = [(ids.new(), spec.system_tokens.sample(rng)) for _ in range(spec.system_prompts)]
        self.waiting: list[tuple[float, int, _Conversation]] = []

    def next(self, at_s: float) -> Content:
        spec, rng = self.spec, self.rng
        if self.waiting and self.waiting[0][0] <= at_s:
            talk = heapq.heappop(self.waiting)[2]
        else:
            system = self.systems[rng.randrange(spec.system_prompts)]
            talk = _Conversation(self.ids.new(), (system,), spec.turns.sample(rng))
        prompt = (*talk.prompt, (self.ids.new(), spec.user_tokens.sample(rng)))
        output = spec.output_tokens.sample(rng)
        talk.prompt = (*prompt, (self.ids.new(), output))
        talk.turns_left -= 1
        if talk.turns_left > 0 and count_tokens(talk.prompt) < spec.max_prompt_tokens:
            pause = rng.expovariate(1 / spec.think_s) if spec.think_s else 0.0
            heapq.heappush(self.waiting, (at_s + pause, talk.session, talk))
        return Content(prompt, output, talk.session)


class Rag(Section):
    """Instructions, then retrieved passages of a corpus with Zipf popularity, then the question.

    `varying_first` puts the question in front, the template mistake that makes every prefix unique.
    """

    kind: Literal["rag"]
    system_tokens: int = Field(300, ge=1)
    corpus_passages: int = Field(1000, ge=1)
    zipf: float = Field(1.0, ge=0)
    passages: int = Field(4, ge=1)
    passage_tokens: Length = _log(400, 0.4, 50, 2000)
    question_tokens: Length = _log(40, 0.6, 4, 400)
    output_tokens: Length = _log(150, 0.6, 8, 1000)
    varying_first: bool = False

    def source(self, ids: Ids, rng: Random) -> Source:
        system = (ids.new(), self.system_tokens)
        corpus = [(ids.new(), self.passage_tokens.sample(rng)) for _ in range(self.corpus_passages)]
        weights = _zipf(self.corpus_passages, self.zipf)

        class _Rag:
            def next(_, at_s: float) -> Content:
                chosen: dict[int, None] = {}
                while len(chosen) < min(self.passages, self.corpus_passages):
                    chosen[_pick(weights, rng)] = None
                question = (ids.new(), self.question_tokens.sample(rng))
                shared = (system, *(corpus[i] for i in chosen))
                prompt = (question, *shared) if self.varying_first else (*shared, question)
                return Content(prompt, self.output_tokens.sample(rng))

        return _Rag()


class Code(Section):
    """Completion in an editor: a growing prefix of one of `files`, then a short cursor context; short answers.

    Successive requests on a file extend its prefix by the tokens typed since, so most of each prompt is cached.
    """

    kind: Literal["code"]
    files: int = Field(50, ge=1)
    zipf: float = Field(0.8, ge=0)
    file_tokens: Length = _log(2500, 0.6, 100, 16_000)
    typed_tokens: Length = _log(40, 0.7, 1, 400)
    context_tokens: Length = fixed(32)
    output_tokens: Length = _log(48, 0.6, 4, 256)

    def source(self, ids: Ids, rng: Random) -> Source:
        weights = _zipf(self.files, self.zipf)
        content = [ids.new() for _ in range(self.files)]
        length = [self.file_tokens.sample(rng) for _ in range(self.files)]
        cursor = [max(1, rng.randrange(n)) if n > 1 else 1 for n in length]

        class _Code:
            def next(_, at_s: float) -> Content:
                i = _pick(weights, rng)
                cursor[i] += self.typed_tokens.sample(rng)
                if cursor[i] > length[i]:
                    content[i], cursor[i] = ids.new(), max(1, length[i] // 4)
                prompt = ((content[i], cursor[i]), (ids.new(), self.context_tokens.sample(rng)))
                return Content(prompt, self.output_tokens.sample(rng), session=i + 1)

        return _Code()


class Agent(Section):
    """Agents that share system prompt and tools, and branch: a task is a tree of steps.

    Each request extends a step of a running task by an observation. With probability `branch` it starts from an
    earlier step instead of the latest, so siblings share the path above them.
    """

    kind: Literal["agent"]
    system_tokens: int = Field(2000, ge=1, description="system prompt and tool descriptions")
    concurrent_tasks: int = Field(8, ge=1)
    task_tokens: Length = _log(200, 0.6, 10, 2000)
    observation_tokens: Length = _log(350, 0.9, 10, 4000)
    output_tokens: Length = _log(120, 0.7, 8, 1000)
    steps: Length = _log(12, 0.5, 2, 60)
    branch: float = Field(0.25, ge=0, le=1)
    max_prompt_tokens: int = Field(64_000, ge=1)

    def source(self, ids: Ids, rng: Random) -> Source:
        return _AgentSource(self, ids, rng)


@dataclass(slots=True)
class _Task:
    session: int
    steps_left: int
    nodes: list[Prompt] = field(default_factory=list)


class _AgentSource:
    def __init__(self, spec: Agent, ids: Ids, rng: Random) -> None:
        self.spec, self.ids, self.rng = spec, ids, rng
        self.system = (ids.new(), spec.system_tokens)
        self.tasks: list[_Task] = []

    def next(self, at_s: float) -> Content:
        spec, rng, ids = self.spec, self.rng, self.ids
        if len(self.tasks) < spec.concurrent_tasks:
            task = _Task(ids.new(), spec.steps.sample(rng))
            self.tasks.append(task)
            prompt: Prompt = (self.system, (ids.new(), spec.task_tokens.sample(rng)))
        else:
            task = self.tasks[rng.randrange(len(self.tasks))]
            earlier = len(task.nodes) > 1 and rng.random() < spec.branch
            node = task.nodes[rng.randrange(len(task.nodes) - 1)] if earlier else task.nodes[-1]
            prompt = (*node, (ids.new(), spec.observation_tokens.sample(rng)))
        output = spec.output_tokens.sample(rng)
        node = (*prompt, (ids.new(), output))
        task.nodes.append(node)
        task.steps_left -= 1
        if task.steps_left <= 0 or count_tokens(node) >= spec.max_prompt_tokens:
            self.tasks.remove(task)
        return Content(prompt, output, task.session)


class Batch(Section):
    """Offline work on documents: instructions, a document, one of `questions` about it, in document order."""

    kind: Literal["batch"]
    instruction_tokens: int = Field(200, ge=1)
    document_tokens: Length = _log(3000, 0.7, 100, 32_000)
    questions: int = Field(4, ge=1)
    question_tokens: Length = fixed(40)
    output_tokens: Length = _log(200, 0.6, 8, 2000)

    def source(self, ids: Ids, rng: Random) -> Source:
        return _BatchSource(self, ids, rng)


class _BatchSource:
    def __init__(self, spec: Batch, ids: Ids, rng: Random) -> None:
        self.spec, self.ids, self.rng = spec, ids, rng
        self.instruction = (ids.new(), spec.instruction_tokens)
        self.document = (0, 0)
        self.asked = spec.questions

    def next(self, at_s: float) -> Content:
        spec, rng = self.spec, self.rng
        if self.asked >= spec.questions:
            self.document, self.asked = (self.ids.new(), spec.document_tokens.sample(rng)), 0
        self.asked += 1
        question = (self.ids.new(), spec.question_tokens.sample(rng))
        return Content((self.instruction, self.document, question), spec.output_tokens.sample(rng), self.document[0])


Structure = Annotated[Plain | Chat | Rag | Code | Agent | Batch, Field(discriminator="kind")]

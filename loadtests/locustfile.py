"""Load tests on Locust: `locust -f loadtests/locustfile.py --host http://127.0.0.1:8000`, with or without a web UI.

Each user class is an application: chat, retrieval, code completion, agents, batch documents. In an open loop (the
default) a Locust user is an independent source of `--pd-rate` requests per second that never waits for an answer;
`n` users are a Poisson process of `n` times that rate. With `--pd-loop closed` a user waits, thinks, and asks again.
`--pd-scenario NAME` plays a scenario of `loadtests/scenarios/` instead, its schedule shared out over the workers.

Rows in the statistics: E2E (from the scheduled time), TTFT, TPOT, ITL (every gap), output tokens, cached tokens,
good (its requests/s are the goodput). Percentiles to believe are in `/pdserve.json` and in the last line of a
headless run: Locust rounds its own.
"""

from __future__ import annotations

import logging
from random import Random
from typing import Any

from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.exception import StopUser
from locust.runners import WorkerRunner

from cluster.errors import UserError
from cluster.workload.arrival import Arrival
from cluster.workload.spec import Workload
from cluster.workload.structures import Agent, Chat
from loadtests.locust_control import Control
from loadtests.locust_wiring import install

log = logging.getLogger("pdserve")


@events.init_command_line_parser.add_listener
def options(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("pdserve")
    group.add_argument("--pd-scenario", default="", help="play a scenario by name or file")
    group.add_argument("--pd-loop", default="open", choices=["open", "closed"], help="open: users never wait")
    group.add_argument("--pd-rate", type=float, default=0.5, help="requests/s of one user in an open loop")
    group.add_argument("--pd-think", type=float, default=2.0, help="mean pause of a user in a closed loop, seconds")
    group.add_argument("--pd-ttft-ms", type=float, default=None, help="SLO: first token")
    group.add_argument("--pd-tpot-ms", type=float, default=None, help="SLO: time per output token")
    group.add_argument("--pd-model", default="", help="model name at the endpoint; default: its first")
    group.add_argument("--pd-tokenizer", default="", help="model folder or `words`; default: the model's own")
    group.add_argument("--pd-seed", type=int, default=1)
    group.add_argument(
        "--pd-drain",
        type=float,
        default=None,
        help="seconds to wait for running requests at the end; default: 10, or the scenario's",
    )
    # Not in the web UI, which has no login: its page would hold the key.
    parser.add_argument(
        "--pd-api-key", default="", env_var="PDSERVE_API_KEY", include_in_web_ui=False, help="bearer token"
    )
    group.add_argument("--pd-out", default="", help="folder for summary.json")


@events.init.add_listener
def set_up(environment: Environment, **_: Any) -> None:
    try:
        install(environment)
    except UserError as mistake:
        log.error("%s", str(mistake).replace("\n", " "))
        raise SystemExit(2) from None  # anything less is logged by Locust with its traceback
    if isinstance(environment.runner, WorkerRunner):
        return  # the master says which users, and its options may name a scenario that this command line does not
    scenario = Control.of(environment).scenario is not None
    environment.user_classes = [c for c in environment.user_classes if (c is ScenarioUser) == scenario]


class ApplicationUser(User):
    """One source of requests with the structure that `prompts` describes."""

    abstract = True
    prompts: dict[str, Any] = {}  # noqa: RUF012
    label = ""

    def on_start(self) -> None:
        self.control = Control.of(self.environment)
        if self.control.failed:
            return
        o = self.control.options
        workload = Workload.model_validate(
            {
                "seed": o.pd_seed,
                "requests": 10**9,
                "arrivals": {"process": "poisson", "rate_per_s": o.pd_rate},
                "prompts": self.prompts,
            }
        )
        self.source = self.control.source(self.label, workload)
        self.alternate = isinstance(workload.prompts, Chat | Agent)
        number = next(self.control._numbers)
        self.rng = Random(f"{o.pd_seed}/{self.control.part}/{self.label}/{number}")
        self.at_s = self.control.clock()

    @task
    def ask(self) -> None:
        if self.control.stopping.is_set():
            raise StopUser
        if self.control.options.pd_loop == "closed":
            self._ask_and_wait()
        else:
            self._ask_on_time()

    def _ask_on_time(self) -> None:
        # The next time depends on the last one and on nothing else: not on when this greenlet gets its turn.
        self.at_s += self.rng.expovariate(self.control.options.pd_rate)
        sample, request = self._next(self.at_s)
        if self.control.stopping.wait(timeout=max(0.0, self.at_s - self.control.clock())):
            raise StopUser
        self.control.send_later(self.label, sample, request)

    def _ask_and_wait(self) -> None:
        if self.control.stopping.is_set():
            raise StopUser
        sample, request = self._next(0.0)
        sample.scheduled_s = self.control.clock()
        # In the group, so that the end of the test waits for it like for any other.
        self.control.in_flight.spawn(self.control.send, self.label, sample, request).join()
        if self.control.stopping.wait(timeout=self.rng.expovariate(1 / max(1e-3, self.control.options.pd_think))):
            raise StopUser

    def _next(self, at_s: float) -> Any:
        c = self.source.next(at_s)
        arrival = Arrival(at_s, c.prompt, c.output_tokens, session=c.session, tenant=self.label)
        return self.control.prepare(arrival, alternate=self.alternate)


class ChatUser(ApplicationUser):
    """Conversations under one system prompt."""

    label = "chat"
    weight = 4
    prompts = {"kind": "chat", "system_tokens": 400}  # noqa: RUF012


class RagUser(ApplicationUser):
    """Instructions, retrieved passages, a question."""

    label = "rag"
    weight = 2
    prompts = {"kind": "rag"}  # noqa: RUF012


class CodeUser(ApplicationUser):
    """Completion in growing files."""

    label = "code"
    weight = 2
    prompts = {"kind": "code"}  # noqa: RUF012


class AgentUser(ApplicationUser):
    """Steps of branching tasks under a long tool prompt."""

    label = "agent"
    weight = 1
    prompts = {"kind": "agent"}  # noqa: RUF012


class BatchUser(ApplicationUser):
    """Questions about documents, one after another."""

    label = "batch"
    weight = 1
    prompts = {"kind": "batch"}  # noqa: RUF012


class ScenarioUser(User):
    """Stands in while a scenario plays: Locust wants users, and the schedule needs none (see locust_control.py)."""

    @task
    def wait_(self) -> None:
        Control.of(self.environment).stopping.wait()
        raise StopUser

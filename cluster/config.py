"""ClusterConfig: one YAML describes a live and a simulated cluster.

Every section is a pydantic model that refuses unknown keys. `load(path)` and `parse(mapping)` turn the first
mistake into one `ConfigError` line: dotted path, value, bound, remedy. Durations name their unit.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cluster.errors import ConfigError
from cluster.messages import Role, Slo
from cluster.yaml_file import read_yaml


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ModelConfig(Section):
    id: str = Field(
        "embedded", description="'embedded' (the model in the package), 'smollm2', a Hugging Face id or a path"
    )
    revision: str | None = None
    served_name: str | None = Field(None, description="name clients use; default: the id")
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    max_model_len: int | None = Field(None, ge=16, description="tokens of prompt plus output; default: the model's own")


class SloConfig(Section):
    ttft_ms: float = Field(500, gt=0)
    tpot_ms: float = Field(50, gt=0)
    itl_p99_ms: float | None = Field(None, gt=0)
    attainment: float = Field(0.95, gt=0, lt=1)

    def to_slo(self) -> Slo:
        itl = None if self.itl_p99_ms is None else self.itl_p99_ms / 1e3
        return Slo(self.ttft_ms / 1e3, self.tpot_ms / 1e3, itl)


class CpuConfig(Section):
    """Engines without a GPU. The plugin parts are explained in kv_transfer/cpu_plugin.py."""

    kvcache_gib: float = Field(0.25, gt=0, le=4096)
    threads: int = Field(1, ge=1, le=256, description="OpenMP threads per engine rank")
    compile: bool = Field(False, description="compile the model at start: slower to start (minutes on two cores)")
    relax_ucx_polling: bool = True
    free_main_thread: bool = True
    sleep_in_queue: bool = True


class EngineConfig(Section):
    kind: Literal["vllm", "simulated"] = "vllm"
    device: Literal["auto", "cpu", "gpu"] = "auto"
    args: dict[str, Any] = Field(default_factory=dict, description="passed to vLLM's engine as they are")
    cpu: CpuConfig = CpuConfig()
    simulated: dict[str, Any] = Field(default_factory=dict, description="see cluster/engine/simulated.py")
    start_timeout_s: float = Field(600, gt=0)
    stall_s: float = Field(
        60, gt=0, description="without an engine step for that long while work waits, a replica is restarted"
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "WARNING"


class LayoutConfig(Section):
    tp: int = Field(1, ge=1, le=64)
    pp: int = Field(1, ge=1, le=64)
    dp: int = Field(1, ge=1, le=1024, description="attention-data-parallel ranks inside one replica (MoE models)")

    @property
    def ranks(self) -> int:
        """Engine ranks of one replica, each with weights and KV of its own."""
        return self.tp * self.pp * self.dp


class ReplicasConfig(Section):
    min: int = Field(1, ge=0, le=4096)
    max: int = Field(1, ge=1, le=4096)
    initial: int | None = Field(None, ge=0, le=4096)

    @model_validator(mode="after")
    def _ordered(self) -> ReplicasConfig:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        if self.initial is not None and not self.min <= self.initial <= self.max:
            raise ValueError(f"initial {self.initial} is outside [{self.min}, {self.max}]")
        return self

    @property
    def start(self) -> int:
        return max(self.min, 1) if self.initial is None else self.initial


class PoolConfig(Section):
    layout: LayoutConfig = LayoutConfig()
    replicas: ReplicasConfig = ReplicasConfig()
    accelerator: str | None = Field(None, description="Ray accelerator type or custom resource, e.g. H100")
    engine_args: dict[str, Any] = Field(default_factory=dict)
    simulated: dict[str, Any] = Field(default_factory=dict)
    num_cpus: float = Field(0.1, ge=0, description="Ray CPUs reserved per replica")
    surge_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="further replicas while an update replaces all; with 0 an old one stops before its new one starts",
    )
    drain_s: float = Field(600, gt=0, description="how long a replica may take to finish accepted work")


class PoolsConfig(Section):
    prefill: PoolConfig | None = Field(PoolConfig(), description="null = colocated: the decode pool does both phases")
    decode: PoolConfig = PoolConfig()


class LimitsConfig(Section):
    """Separate limits for each wait of one request. None of them measures someone else's queue."""

    queue_s: float = Field(60, gt=0, description="wait in the router for a place")
    prefill_s: float = Field(120, gt=0, description="prefill leg, from its start to the ticket")
    first_token_s: float = Field(60, gt=0, description="decode leg, from its start to the first token")
    idle_s: float = Field(60, gt=0, description="gap between two tokens")
    attempts: int = Field(4, ge=1, le=16, description="places tried before the first token")
    migrations: int = Field(3, ge=0, le=16, description="moves to another decode engine after the first token")
    silent_s: float = Field(5, gt=0, description="a worker that owes a message and sends none counts as lost")
    stall_s: float = Field(10, gt=0, description="an engine that owes output and makes no step counts as lost")


class PlacementConfig(Section):
    policy: Literal["cost", "round_robin", "least_loaded", "power_of_two", "approximate"] = "cost"
    no_prefill_worker: Literal["local", "fail"] = "local"
    conditional: bool = Field(True, description="let a decode engine prefill where that is predicted to be faster")
    index_max_blocks: int = Field(4_000_000, ge=1)
    decision_log: str | None = None
    shadow: bool = False


class AdmissionConfig(Section):
    max_queue: int = Field(
        1024, ge=1, description="requests that may wait, over all routers: each keeps an even share of them"
    )
    reject_unattainable: bool = False
    retry_after_s: float = Field(1.0, gt=0)
    tenant_tokens_per_s: float | None = Field(
        None, gt=0, description="prompt and expected output tokens of one tenant, over all routers like max_queue"
    )
    late_last: bool = Field(
        True, description="requests that would miss their TTFT limit anyway wait behind those that can still keep it"
    )
    starvation_s: float = Field(
        30, gt=0, description="wait after which a lower priority gets every second place, late requests one of 32"
    )
    backlog_fraction: float = Field(
        0.25,
        gt=0,
        description="share of `slo.ttft_ms` that a prompt may queue in an engine; beyond, it waits in the router",
    )
    wait_for_workers: bool = Field(
        False, description="without a ready worker wait in the router instead of 503: for pools that scale to zero"
    )


class TenantsConfig(Section):
    api_keys_file: str | None = Field(None, description="lines of `key tenant`; without one, no key is asked for")
    api_keys_env: str | None = Field(None, description="environment variable with `key tenant` pairs, comma-separated")
    header: str | None = Field(None, description="trusted header that names the tenant (behind your own gateway)")
    operators: list[str] = Field(
        ["operator"],
        description="tenants that may read /pdserve/status and /pdserve/records; all may where none are told apart",
    )
    priority_min: int = Field(
        0,
        description="where tenants are told apart, a smaller `priority` of a body counts as this, except operators'",
    )


class HttpConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    ingress: Literal["auto", "direct", "proxy", "haproxy"] = Field(
        "auto", description="auto = direct with one router replica (it listens itself), else Serve's proxy"
    )
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    keep_alive_s: float | None = Field(None, gt=0, description="SSE comment interval during long prefills")
    allow_chat_template: bool = False
    max_n: int = Field(32, ge=1)
    max_logprobs: int = Field(20, ge=0)
    max_stop: int = Field(16, ge=1)
    max_stop_chars: int = Field(256, ge=1)
    max_prompts: int = Field(128, ge=1)


class RouterConfig(Section):
    replicas: int = Field(1, ge=1, le=256)
    openai_arguments: list[str] = Field(
        default_factory=list, description="further arguments of vLLM's OpenAI server, e.g. tool call parsers"
    )
    num_cpus: float = Field(0.1, ge=0)
    surge_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="further replicas while an update replaces all; with 0 an old one stops before its new one starts",
    )
    node_resource: str | None = Field(
        None, description="Ray custom resource of nodes for routers, one unit per replica; null: any node"
    )
    http: HttpConfig = HttpConfig()
    placement: PlacementConfig = PlacementConfig()
    admission: AdmissionConfig = AdmissionConfig()
    tenants: TenantsConfig = TenantsConfig()
    limits: LimitsConfig = LimitsConfig()
    drain_s: float = Field(600, gt=0)


class KvTransferConfig(Section):
    connector: Literal["nixl"] = "nixl"
    lease_s: float = Field(
        30,
        ge=1,
        le=3600,
        description="the connector's lease, renewed while decode waits; backstop only: the open call is the lease",
    )
    on_failure: Literal["recompute", "fail"] = "recompute"
    tp_pairs: Literal["tested", "connector"] = Field(
        "tested", description="which TP pairs to allow: those with tests, or all that the connector accepts"
    )
    port_min: int = Field(20000, ge=1024, le=65535, description="engines listen in [port_min, port_max]")
    port_max: int = Field(29999, ge=1024, le=65535)
    extra: dict[str, Any] = Field(default_factory=dict, description="passed to the connector as they are")

    @model_validator(mode="after")
    def _some_ports(self) -> KvTransferConfig:
        if self.port_min > self.port_max:
            raise ValueError(f"port_min {self.port_min} is above port_max {self.port_max}")
        return self


class AutoscalingConfig(Section):
    policy: Literal["goodput", "off"] = "off"
    accelerators_max: int | None = Field(None, ge=1)
    interval_s: float = Field(5, gt=0)
    upscale_delay_s: float = Field(10, ge=0)
    downscale_delay_s: float = Field(120, ge=0)
    look_back_s: float = Field(60, gt=0)
    min_samples: int = Field(20, ge=1)
    startup_s: float = Field(60, ge=0, description="start-up time assumed before the first one was measured")


class NetworkConfig(Section):
    host: str | None = Field(
        None, description="address that engines and routers of a node listen on for each other; default: the node's"
    )
    rack_label: str = Field("pdserve.io/rack", description="Ray node label that names a node's rack or switch")


class TracingConfig(Section):
    otlp_endpoint: str | None = None


SETTLE_S = 5.0
"""How long a router's word may take after its own limit has passed."""


class ClusterConfig(Section):
    name: str = Field("pdserve", pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?$")
    model: ModelConfig = ModelConfig()
    slo: SloConfig = SloConfig()
    engine: EngineConfig = EngineConfig()
    pools: PoolsConfig = PoolsConfig()
    router: RouterConfig = RouterConfig()
    kv_transfer: KvTransferConfig = KvTransferConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    network: NetworkConfig = NetworkConfig()
    tracing: TracingConfig = TracingConfig()

    @model_validator(mode="before")
    @classmethod
    def _wait_where_a_pool_may_be_empty(cls, raw: Any) -> Any:
        """A cluster that may be scaled to zero is woken by its first request, so that one has to wait."""
        if not isinstance(raw, dict) or not isinstance(raw.get("pools"), dict):
            return raw
        replicas = [p.get("replicas") for p in raw["pools"].values() if isinstance(p, dict)]
        router = raw.get("router", {})
        if any(isinstance(r, dict) and r.get("min") == 0 for r in replicas) and isinstance(router, dict):
            admission = router.get("admission", {})
            if isinstance(admission, dict):
                router = {**router, "admission": {"wait_for_workers": True, **admission}}
                return {**raw, "router": router}
        return raw

    @property
    def lease_backstop_s(self) -> float:
        """How long a ticket is kept that nobody settles: longer than any router waits for its first token.

        A router that is gone ends its leases with its link. This is for one that was stopped, and keeps its link.
        """
        return max(self.kv_transfer.lease_s, self.router.limits.first_token_s + SETTLE_S)

    def pool(self, role: Role) -> PoolConfig:
        pool = self.pools.prefill if role is Role.PREFILL else self.pools.decode
        if pool is None:
            raise ConfigError("pools.prefill", "is null: this cluster is colocated", "use the decode pool")
        return pool

    @property
    def colocated(self) -> bool:
        return self.pools.prefill is None


def load(path: str | Path) -> ClusterConfig:
    """Read a YAML file.

    Raises:
        ConfigError: the file is missing, is not YAML, or holds a key or value that cannot be used.
    """
    raw = read_yaml(path)
    return parse(raw if raw is not None else {})


def parse(raw: Any) -> ClusterConfig:
    """Validate a mapping. Raises ConfigError with the first mistake."""
    if not isinstance(raw, dict):
        raise ConfigError("(top level)", f"is a {type(raw).__name__}, not a mapping", "start with `model:` or `pools:`")
    try:
        return ClusterConfig.model_validate(raw)
    except ValidationError as e:
        raise _first_mistake(e) from None


def _first_mistake(error: ValidationError) -> ConfigError:
    # Unknown keys first: a misspelt key often makes other fields look missing.
    mistakes = sorted(error.errors(include_url=False), key=lambda m: m["type"] != "extra_forbidden")
    first = mistakes[0]
    path = ".".join(str(part) for part in first["loc"]) or "(top level)"
    if first["type"] == "extra_forbidden":
        known = _known_keys(first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"did you mean `{close[0]}`?" if close else "known keys: " + ", ".join(known)
        return ConfigError(path, "unknown key", hint)
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(
        path,
        f"{first['input']!r}: {message[0].lower() + message[1:]}" if not isinstance(first["input"], dict) else message,
    )


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = ClusterConfig
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        options = [annotation, *get_args(annotation)] if get_origin(annotation) is not Annotated else [annotation]
        model = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return sorted(model.model_fields)

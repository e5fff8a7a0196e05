"""Starts and ends a cluster from the command line: Ray on this machine (or an address), then the Serve application."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cluster.config import ClusterConfig
from cluster.errors import UserError
from cluster.messages import Role
from cluster.preflight import preflight
from cluster.runtime.environment import ingress, ray_environment

Progress = Callable[[str, float], None]
"""(what is being waited for, seconds so far)"""

NAMESPACE = "pdserve"
ENGINE_GIB = 2.7
"""Resident memory of one CPU engine without its KV (docs/architecture.md has the command that measures it)."""


@dataclass(slots=True)
class LocalCluster:
    """A running application, and what was started for it.

    Attributes:
        url: where clients reach it.
        owns_ray: this process started Ray, so it ends it.
    """

    config: ClusterConfig
    url: str
    owns_ray: bool
    started_s: float
    ready_s: dict[str, float] = field(default_factory=dict)
    _router: Any = None

    def router_status(self) -> dict[str, Any]:
        """What `/pdserve/status` shows, asked inside: the path may want an operator's key."""
        value: dict[str, Any] = self._routers().status.remote().result(timeout_s=10)
        return value

    def _routers(self) -> Any:
        from ray import serve

        if self._router is None:
            handle = serve.get_app_handle(self.config.name)
            # The routers' own setting, which this process shares, is for event loops; here is none.
            handle._init(_run_router_in_separate_loop=True)  # type: ignore[no-untyped-call]
            self._router = handle
        return self._router

    def stop(self, *, progress: Progress | None = None) -> None:
        """Let running requests finish, then end the application and, if it is ours, Ray. No process is left."""
        import ray
        from ray import serve

        since = time.monotonic()

        def tell(what: str) -> None:
            if progress is not None:
                progress(what, time.monotonic() - since)

        if not ray.is_initialized():
            return
        tell("running requests")
        with contextlib.suppress(Exception):
            # Every router, and before any engine: a request between its legs still needs both pools.
            self._routers().broadcast("drain").results(timeout_s=self.config.router.drain_s)
        tell("replicas")
        with contextlib.suppress(Exception):
            serve.delete(self.config.name, _blocking=True)
        tell("Ray")
        # The application is gone, with its engines; Ray ends what is left. Serve's own shutdown before that would only
        # race with it.
        ray.shutdown()


def start(
    config: ClusterConfig,
    *,
    address: str | None = None,
    progress: Progress | None = None,
    num_cpus: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> LocalCluster:
    """Start the cluster and wait until it serves.

    Args:
        address: of a running Ray cluster; None starts one on this machine, for this process.
        progress: called a few times a second while something is being waited for.
        stop: asked while waiting; once true, waiting ends and the cluster is returned as it is.

    Raises:
        UserError: a package, a port, memory or the Ray cluster is missing; one line each.
        ConfigError: the configuration cannot be used.
    """
    started = time.monotonic()
    check_packages(config)
    preflight(config)
    if address is None:
        # A cluster of one machine stays on loopback, side channels and links included.
        network = config.network.model_copy(update={"host": config.network.host or "127.0.0.1"})
        config = config.model_copy(update={"network": network})
        check_port(config.router.http.host, config.router.http.port)
        check_memory(config)
    os.environ.update({k: v for k, v in ray_environment(config).items() if k not in os.environ})
    import ray
    from ray import serve

    from cluster.app import build

    for name in ("ray", "ray.serve"):  # both set their level when they are imported
        logging.getLogger(name).setLevel(logging.ERROR)

    def tell(what: str) -> None:
        if progress is not None:
            progress(what, time.monotonic() - started)

    tell("Ray")
    if address is not None:
        check_address(address)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            num_cpus=None if address else max(num_cpus or 0, os.cpu_count() or 1, 4),
            runtime_env={"env_vars": ray_environment(config)},
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as e:
        what = f"no Ray cluster at {address}" if address else "Ray did not start"
        raise UserError(
            f"--address: {what} ({_line(e)}); start one with `ray start --head` or leave the option out"
        ) from e
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():  # Ray puts its own in their place
            signal.signal(number, handler)
    cluster = LocalCluster(
        config, f"http://{config.router.http.host}:{config.router.http.port}", address is None, started
    )
    try:
        http = config.router.http
        # With direct ingress Serve still starts a proxy; the public port belongs to the router then.
        port = free_port(http.host) if ingress(config) == "direct" else http.port
        serve.start(proxy_location="HeadOnly", http_options={"host": http.host, "port": port})
        _run_application(build({"config": config.model_dump(mode="json")}), config, tell, stop)
        _wait_for_pairs(cluster, tell, stop)
    except BaseException:
        cluster.stop()
        raise
    cluster.ready_s["total"] = time.monotonic() - started
    return cluster


def _run_application(
    application: Any, config: ClusterConfig, tell: Callable[[str], None], stop: Callable[[], bool]
) -> None:
    from ray import serve

    from cluster.autoscaling.deploy import deploy_with_policy
    from cluster.autoscaling.serve_policy import application_policy

    policy = application_policy(config)
    failure: list[BaseException] = []

    def deploy() -> None:
        try:
            if policy is None:
                serve.run(application, name=config.name, route_prefix="/")
            else:
                deploy_with_policy(config, policy, config.engine.start_timeout_s)
        except BaseException as e:
            failure.append(e)

    thread = threading.Thread(target=deploy, daemon=True, name="deploy")
    thread.start()
    deadline = time.monotonic() + config.engine.start_timeout_s
    while thread.is_alive() and not stop():
        thread.join(0.25)
        tell(_deployments(config.name))
        reason = _failing(config.name)
        if reason is not None:
            raise UserError(f"the cluster did not start: {reason}")
        if time.monotonic() > deadline:
            raise UserError(
                f"engine.start_timeout_s: not ready after {config.engine.start_timeout_s:g} s; raise it, or see the"
                " replica logs in Ray's session folder"
            )
    if failure:
        raise UserError(f"the cluster did not start: {_line(failure[0])}") from failure[0]


def _deployments(name: str) -> str:
    from ray import serve

    with contextlib.suppress(Exception):
        application = serve.status().applications.get(name)
        if application is not None:
            waiting = []
            for deployment, status in application.deployments.items():
                running = sum(n for state, n in status.replica_states.items() if str(state).endswith("RUNNING"))
                total = sum(status.replica_states.values())
                if running < total or total == 0:
                    waiting.append(f"{deployment} {running}/{max(total, 1)}")
            return "engines: " + ", ".join(waiting) if waiting else "the application"
    return "the application"


def _failing(name: str) -> str | None:
    """The first replica failure, in one line; None while all is well."""
    from ray import serve

    with contextlib.suppress(Exception):
        application = serve.status().applications.get(name)
        if application is None:
            return None
        for deployment, status in application.deployments.items():
            if str(status.status).endswith(("DEPLOY_FAILED", "UNHEALTHY")) and status.message:
                return f"{deployment}: {_cause(status.message)}"
    return None


def _cause(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    for line in reversed(lines):
        if "Error" in line or ": " in line:
            return line[:400]
    return lines[-1][:400] if lines else "unknown"


def _wait_for_pairs(cluster: LocalCluster, tell: Callable[[str], None], stop: Callable[[], bool]) -> None:
    """Until every pool has its replicas at the router and every pair has met."""
    config = cluster.config
    deadline = time.monotonic() + config.engine.start_timeout_s
    while not stop():
        try:
            status = cluster.router_status()
        except Exception as e:  # it starts, or it failed: either way Serve tries again
            problem = f"the router ({type(e).__name__}: {_line(e)})"
        else:
            problem = ""
            for role in (Role.DECODE, Role.PREFILL):
                pool = status["pools"].get(role.value)
                if pool is not None and len(pool["replicas"]) < config.pool(role).replicas.start:
                    problem = f"{role} replicas at the router"
            warming = [pair for pair in status["pairs"] if pair["state"] == "warming"]
            if not problem and warming:
                problem = f"first transfer of {len(warming)} pair(s)"
        if not problem:
            return
        if time.monotonic() > deadline:
            raise UserError(f"not ready after {config.engine.start_timeout_s:g} s: still waiting for {problem}")
        tell(problem)
        time.sleep(0.25)


def fetch_status(url: str, api_key: str | None = None) -> dict[str, Any]:
    """`GET /pdserve/status` of a router.

    Raises:
        UserError: nothing answers there, something else does, or the key is not an operator's.
    """
    import httpx

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(f"{url}/pdserve/status", headers=headers, timeout=10)
        if response.status_code in (401, 403):
            raise UserError(
                "--api-key: an operator's key is needed (router.tenants.operators); give it or set PDSERVE_API_KEY"
            )
        response.raise_for_status()
        value = response.json()
        # Other servers answer any path with a page of their own.
        if not isinstance(value, dict) or not all(
            isinstance(value.get(part), dict) for part in ("pools", "router", "goodput")
        ):
            raise ValueError("not a router's status")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:
        raise UserError(
            f"--url: no pdserve answers at {url} ({type(e).__name__}); start one with `pdserve serve CONFIG`"
        ) from e
    return value


def check_packages(config: ClusterConfig) -> None:
    """Raises UserError for a package of the lock file that is not installed."""
    from importlib.util import find_spec

    needed = ["ray", "vllm", "transformers"] + ([] if config.colocated or config.engine.kind != "vllm" else ["nixl"])
    for package in needed:
        if find_spec(package) is None:
            raise UserError(f"package {package} is not installed; run `make setup` or install requirements/cpu.lock")


def check_address(address: str) -> None:
    """Raises UserError where nothing listens at HOST:PORT; Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()) or "/" in host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as e:
        raise UserError(
            f"--address: no Ray cluster at {address} ({e.strerror or e});"
            " start one with `ray start --head` or leave the option out"
        ) from e


def check_port(host: str, port: int) -> None:
    """Raises UserError where the HTTP port is taken."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As Serve binds it, without SO_REUSEADDR: closed connections keep a port for up to a minute.
        try:
            probe.bind((host, port))
        except OSError as e:
            raise UserError(
                f"router.http.port: {port} on {host} cannot be used ({e.strerror});"
                " stop what listens there, wait a minute after a restart, or choose another"
            ) from e


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def check_memory(config: ClusterConfig) -> None:
    """Raises UserError where CPU engines ask for more memory than this machine has free."""
    if config.engine.kind != "vllm":
        return
    from cluster.engine.vllm.environment import runs_on_cpu

    if not runs_on_cpu(config):
        return
    import psutil

    engines = sum(
        config.pool(role).replicas.start * config.pool(role).layout.ranks
        for role in ([Role.DECODE] if config.colocated else [Role.PREFILL, Role.DECODE])
    )
    needed = engines * (config.engine.cpu.kvcache_gib + ENGINE_GIB)
    free = psutil.virtual_memory().available / 2**30
    if needed > free:
        raise UserError(
            f"engine.cpu.kvcache_gib: {config.engine.cpu.kvcache_gib:g}: {engines} engines need about {needed:.1f} GiB"
            f" with it and {free:.1f} GiB are free; lower it or start fewer replicas"
        )


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__

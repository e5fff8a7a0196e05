"""Ray's and Serve's own switches, set before either is imported. Each line says what it is for."""

from __future__ import annotations

from cluster.config import ClusterConfig


def ray_environment(config: ClusterConfig) -> dict[str, str]:
    """Environment of every Ray process of a cluster that pdserve starts; manifests set the same."""
    http = config.router.http
    environment = {
        # One loop per replica: with a loop of its own for user code, every chunk and call crosses threads twice.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # What fails its health checks makes no progress, so it is killed: a graceful stop would wait for it (and with
        # it the GPU, or the routers' port) until the end of its drain time. Its requests have moved on before.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray starts workers at niceness 15: on a shared host everything else would come before an engine.
        "RAY_worker_niceness": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    if ingress(config) == "direct":
        # The one router replica listens itself: no proxy process, no hop per chunk.
        environment |= {
            "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http.port),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http.port + 1),  # exclusive
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
            "RAY_SERVE_PORT_QUARANTINE_S": "0",
        }
    elif ingress(config) == "haproxy":
        environment |= {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
    return environment


def ingress(config: ClusterConfig) -> str:
    """How HTTP reaches a router: `direct` (it listens itself), `proxy` (Serve's proxy) or `haproxy`."""
    if config.router.http.ingress != "auto":
        return config.router.http.ingress
    return "direct" if config.router.replicas == 1 else "proxy"

"""The gateway around the HTTP application, outermost first: routes, identity, the body, the start of a stream,
clients that leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cluster.config import RouterConfig
from cluster.messages import Slo
from router.gateway.asgi import App
from router.gateway.auth import Authenticate
from router.gateway.body import CheckBody
from router.gateway.fields import BodyLimits
from router.gateway.keys import KeyRing
from router.gateway.leaving import ClientLeft
from router.gateway.routes import PublicRoutes
from router.gateway.stream import StreamStart


def guard(
    app: App,
    config: RouterConfig,
    *,
    vocab_size: int,
    slo: Slo,
    environ: Mapping[str, str],
    extra_paths: Iterable[str] = (),
) -> App:
    """Wrap an application that speaks OpenAI's API.

    Args:
        vocab_size: width of the model's output; every token id of a client is below it.
        slo: the cluster's latency limits, for requests whose headers set only one of them.
        environ: where `router.tenants.api_keys_env` is looked up.
        extra_paths: paths of the application besides OpenAI's that clients may GET.

    Raises:
        ConfigError: the API keys cannot be read.
    """
    http = config.http
    keys = KeyRing.from_config(config.tenants, environ)
    separate = keys is not None or config.tenants.header is not None
    inner = StreamStart(ClientLeft(app), http.keep_alive_s)
    checked = CheckBody(
        inner,
        BodyLimits.from_config(http, vocab_size),
        http.max_body_bytes,
        slo=slo,
        separate_tenants=separate,
        priority_min=config.tenants.priority_min,
        operators=config.tenants.operators,
    )
    return PublicRoutes(Authenticate(checked, config.tenants, keys), extra_paths)

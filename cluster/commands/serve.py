"""`pdserve serve CONFIG`: start a cluster and serve until told to stop."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from cluster.commands.output import err, print_json, styled
from cluster.commands.waiting import Waiting


def command(
    config: Annotated[
        Path | None, typer.Argument(help="YAML file; without one: 1 prefill and 1 decode engine of the embedded model")
    ] = None,
    address: Annotated[str | None, typer.Option(help="a running Ray cluster; default: start one here")] = None,
    port: Annotated[int | None, typer.Option(help="instead of router.http.port")] = None,
    model: Annotated[
        str | None, typer.Option(help="instead of model.id: embedded, smollm2, a Hugging Face id or a path")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="print one JSON object when ready")] = False,
) -> None:
    """Serve a model from a prefill and a decode pool, over OpenAI's API.

    Example: pdserve serve cluster.yaml --port 8000
    """
    from cluster.commands.settings import load_config
    from cluster.runtime.local import start

    resolved = load_config(config, port=port, model=model)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Waiting("starting") as waiting:
        cluster = start(resolved, address=address, progress=waiting, stop=stop.is_set)
    if not stop.is_set():
        if json_:
            print_json({"url": cluster.url, "model": resolved.model.id, "ready_s": round(cluster.ready_s["total"], 2)})
        name = resolved.model.served_name or resolved.model.id
        ready = f"/v1 (ready after {cluster.ready_s['total']:.0f} s); Ctrl-C ends it after its running requests"
        err.print(styled(("pdserve", "bold"), " serves ", (name, "cyan"), f" at {cluster.url}{ready}"))
        while not stop.wait(0.5):
            pass
    with Waiting("stopping") as waiting:
        cluster.stop(progress=waiting)
    err.print("stopped")

"""The rendered `cpu-demo` on a Ray cluster of its own, by `serve deploy`, as KubeRay would do it: with Ray's token,
Serve's proxies and the manifests' environment. It answers a chat, and a real Prometheus and Alertmanager read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.config import load, parse
from cluster.kubernetes.groups import environment, groups
from cluster.kubernetes.manifests import load as load_manifests
from cluster.kubernetes.rules.monitoring import expressions, metrics_of, panels
from cluster.kubernetes.serve_config import serve_config_text

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TOOLS = Path(sys.prefix) / "k8s-tools" / "usr" / "bin"
START_S = 900  # an idle machine needs under a minute


@dataclass
class Deployed:
    url: str
    ray_metrics: str
    dashboard: str
    agent: str
    model: str


def free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def until(what: str, seconds: float, ask: Callable[[], Any]) -> Any:
    """The first true answer. An exception of httpx is a no."""
    deadline = time.monotonic() + seconds
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = ask()
            if last:
                return last
        except httpx.HTTPError as e:
            last = e
        time.sleep(0.5)
    raise AssertionError(f"{what}: not within {seconds} s ({last!r})")


def die_with_parent() -> None:
    """In the child, before it runs: SIGTERM if the test process goes away without its teardown."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def end(process: subprocess.Popen[bytes], seconds: float) -> None:
    """SIGTERM to the process, SIGKILL to what is left of its group."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait(10)


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    gcs, dashboard, agent, metrics, http, client = free_ports(6)
    raw = yaml.safe_load((ROOT / "k8s/overlays/cpu-demo/config.yaml").read_text())
    # Where it differs from the overlay: a free port on loopback, and the goodput policy, whose metrics alerts use.
    raw["router"]["http"] |= {"host": "127.0.0.1", "port": http}
    raw["autoscaling"] = {"policy": "goodput", "accelerators_max": 2, "interval_s": 1}
    raw["engine"]["start_timeout_s"] = START_S
    config = parse(raw)
    resources: dict[str, float] = {}
    for group in groups(load(ROOT / "k8s/overlays/cpu-demo/config.yaml")).values():
        for name, amount in group.resources.items():
            resources[name] = resources.get(name, 0) + float(amount)
    cpus = resources.pop("CPU")
    folder = Path(tempfile.mkdtemp(prefix="pk", dir="/tmp"))  # Ray's socket paths must be short
    serve_file = folder / "serve.yaml"
    serve_file.write_text(serve_config_text(config))
    env = os.environ | environment(config)
    env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "PATH": f"{BIN}:{os.environ['PATH']}"}
    head = [
        *("ray", "start", "--head", "--block", "--disable-usage-stats", f"--temp-dir={folder / 'ray'}"),
        *(f"--port={gcs}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--metrics-export-port={metrics}"),
        *(f"--ray-client-server-port={client}", "--min-worker-port=0", "--max-worker-port=0"),
        *(f"--num-cpus={cpus:g}", f"--resources={json.dumps(resources)}", "--object-store-memory=200000000"),
    ]
    with (folder / "ray.log").open("wb") as log:
        ray = subprocess.Popen(
            head, env=env, stdout=log, stderr=log, cwd=folder, start_new_session=True, preexec_fn=die_with_parent
        )
    try:
        token = {"Authorization": f"Bearer {env['RAY_AUTH_TOKEN']}"}
        head_url = f"http://127.0.0.1:{dashboard}"
        until("Ray", 60, lambda: httpx.get(f"{head_url}/api/gcs_healthz", headers=token).is_success)
        command = ["serve", "deploy", "-a", head_url, str(serve_file)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        url = f"http://127.0.0.1:{http}"
        until("a decode engine", START_S, lambda: httpx.get(f"{url}/health", timeout=10).status_code == 200)

        def pair_is_warm() -> bool:
            status = httpx.get(f"{url}/pdserve/status", timeout=10).json()
            ready = all(len(pool["replicas"]) == 1 for pool in status["pools"].values()) and len(status["pools"]) == 2
            return ready and bool(status["pairs"]) and all(p["state"] != "warming" for p in status["pairs"])

        until("the pair", START_S, pair_is_warm)
        yield Deployed(url, f"127.0.0.1:{metrics}", head_url, f"http://127.0.0.1:{agent}", "embedded")
        subprocess.run(["serve", "shutdown", "-a", head_url, "-y"], env=env, capture_output=True, timeout=60)
    finally:
        end(ray, 90)
        shutil.rmtree(folder, ignore_errors=True)


def chat(deployed: Deployed, text: str, **options: Any) -> str:
    body = {"model": deployed.model, "messages": [{"role": "user", "content": text}], "temperature": 0, **options}
    answer = httpx.post(f"{deployed.url}/v1/chat/completions", json={"max_tokens": 24, **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_cpu_demo_answers_a_chat(deployed: Deployed) -> None:
    assert "Tokyo" in chat(deployed, "What is the capital of Japan?")


def test_the_probes_of_the_manifests_are_answered(deployed: Deployed) -> None:
    assert httpx.get(f"{deployed.url}/-/healthz").status_code == 200
    assert httpx.get(f"http://{deployed.ray_metrics}/metrics").status_code == 200
    # Kubelets have no token of Ray's.
    assert httpx.get(f"{deployed.dashboard}/api/gcs_healthz").status_code == 200
    assert httpx.get(f"{deployed.agent}/api/local_raylet_healthz").status_code == 200


def test_nobody_runs_code_without_the_token(deployed: Deployed) -> None:
    for path in ("/api/serve/applications/", "/api/jobs/"):
        assert httpx.get(f"{deployed.dashboard}{path}").status_code in (401, 403), path


def find(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(TOOLS))
    if found is None:
        pytest.skip(f"SKIPPED FOR WANT OF A TOOL: no {name} here; `make k8s-tools` fetches it from Debian's packages")
    return found


@pytest.fixture(scope="module")
def observed(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with monitoring(deployed, tmp_path_factory.mktemp("prometheus")) as urls:
        yield urls


def runnable_alertmanager(folder: Path) -> str:
    """Debian's build reads its templates from /usr/share; an unpacked one gets a copy that reads them from `folder`."""
    program, templates = find("prometheus-alertmanager"), "prometheus/alertmanager"
    if Path("/usr/share", templates).is_dir():
        return program
    installed = f"/usr/share/{templates}".encode()
    copy = folder / "alertmanager"
    copy.write_bytes(Path(program).read_bytes().replace(installed, b"./" * (len(installed) // 2)))
    copy.chmod(0o755)
    for template in (TOOLS.parent / "share" / templates).glob("*.tmpl"):
        shutil.copy(template, folder)
    return str(copy)


@contextlib.contextmanager
def monitoring(deployed: Deployed, folder: Path) -> Iterator[tuple[str, str]]:
    """URLs of a Prometheus with the project's rules that scrapes the cluster, and of its Alertmanager."""
    prometheus, alertmanager = find("prometheus"), runnable_alertmanager(folder)
    port, alert_port = free_ports(2)
    (rules,) = load_manifests((ROOT / "k8s/overlays/monitoring/rules.yaml").read_text())
    for group in rules["spec"]["groups"]:
        group["interval"] = "1s"
    watchdog = {"alert": "Watchdog", "expr": "vector(1)", "labels": {"severity": "ticket"}}
    rules["spec"]["groups"].append({"name": "test", "interval": "1s", "rules": [watchdog]})
    (folder / "rules.yml").write_text(yaml.safe_dump({"groups": rules["spec"]["groups"]}))
    jobs = [
        ("pdserve/pdserve-router", deployed.url.removeprefix("http://")),
        ("pdserve/pdserve-ray", deployed.ray_metrics),
    ]
    config = {
        "global": {"scrape_interval": "1s"},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{alert_port}"]}]}]},
        "scrape_configs": [{"job_name": name, "static_configs": [{"targets": [target]}]} for name, target in jobs],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    route = {"route": {"receiver": "none", "group_wait": "1s"}, "receivers": [{"name": "none"}]}
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(route))
    commands = [
        [prometheus, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
         f"--web.listen-address=127.0.0.1:{port}"],
        [alertmanager, f"--config.file={folder}/alertmanager.yml", f"--storage.path={folder}/alerts",
         f"--web.listen-address=127.0.0.1:{alert_port}", "--cluster.listen-address="],
    ]  # fmt: skip
    started = [
        subprocess.Popen(
            c,
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        for c in commands
    ]
    try:
        urls = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{alert_port}"
        for url in urls:
            until(url, 60, lambda url=url: httpx.get(f"{url}/-/ready").is_success)
        yield urls
    finally:
        for process in started:
            end(process, 20)


def query(url: str, expression: str) -> list[Any]:
    answer = httpx.get(f"{url}/api/v1/query", params={"query": expression}, timeout=20).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    return list(answer["data"]["result"])


def board() -> list[dict[str, Any]]:
    return list(panels(json.loads((ROOT / "k8s/overlays/monitoring/dashboard.json").read_text())))


def test_both_targets_are_up(observed: tuple[str, str]) -> None:
    until("targets", 30, lambda: len(query(observed[0], "up == 1")) == 2)


def test_every_metric_of_rules_and_panels_exists(deployed: Deployed, observed: tuple[str, str]) -> None:
    chat(deployed, "Once upon a time")
    chat(deployed, "What is a KV cache?", max_tokens=8)
    (rules,) = load_manifests((ROOT / "k8s/overlays/monitoring/rules.yaml").read_text())
    named = {m for _, expr in expressions(rules) for m in metrics_of(expr)}
    named |= {m for panel in board() for target in panel.get("targets", []) for m in metrics_of(target["expr"])}
    assert len(named) > 30

    def missing() -> list[str]:
        return sorted(name for name in named if not query(observed[0], f"count({name})"))

    try:
        until("all metrics", 30, lambda: not missing())
    except AssertionError:
        assert missing() == []


def test_rules_evaluate_and_alerts_arrive(observed: tuple[str, str]) -> None:
    prometheus, alertmanager = observed

    def rules() -> list[dict[str, Any]]:
        groups_found = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups_found for rule in group["rules"]]

    until("rules", 30, lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert [rule["name"] for rule in rules() if rule["health"] != "ok"] == []

    def alerts() -> set[str]:
        return {alert["labels"]["alertname"] for alert in httpx.get(f"{alertmanager}/api/v2/alerts").json()}

    until("the watchdog", 60, lambda: "Watchdog" in alerts())
    assert alerts() <= {"Watchdog"}, "a healthy cluster pages nobody"


def test_every_panel_can_be_drawn(observed: tuple[str, str]) -> None:
    for panel in board():
        for target in panel.get("targets", []):
            query(observed[0], target["expr"].replace("$__rate_interval", "1m"))

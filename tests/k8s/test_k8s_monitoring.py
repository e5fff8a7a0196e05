"""Alert rules and the dashboard, by Prometheus' own tools and against the metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.goodput.catalogue import CATALOGUE
from cluster.kubernetes.dashboard import dashboard
from cluster.kubernetes.rules.monitoring import expressions, metrics_of, panels, unknown_metrics

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "k8s" / "overlays" / "monitoring"
RULE = yaml.safe_load((MONITORING / "rules.yaml").read_text())
BOARD = json.loads((MONITORING / "dashboard.json").read_text())
ALERTS = [rule for group in RULE["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
TESTS = Path(__file__).parent / "alerts_test.yaml"


@pytest.fixture
def rule_file(tmp_path):
    path = tmp_path / "alerts.yaml"
    path.write_text(yaml.safe_dump({"groups": RULE["spec"]["groups"]}, sort_keys=False))
    return path


def promtool(tool, *arguments):
    return subprocess.run([tool("promtool"), *map(str, arguments)], capture_output=True, text=True)


def test_promtool_accepts_the_rules(tool, rule_file):
    done = promtool(tool, "check", "rules", "--lint=all", "--lint-fatal", rule_file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_when_they_should_and_only_then(tool, rule_file):
    shutil.copy(TESTS, rule_file.parent)
    done = promtool(tool, "test", "rules", rule_file.parent / TESTS.name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_threshold_fails_the_alert_tests(tool, rule_file):
    shutil.copy(TESTS, rule_file.parent)
    rule_file.write_text(rule_file.read_text().replace("vector(0.95)", "vector(0.5)"))
    assert promtool(tool, "test", "rules", rule_file.parent / TESTS.name).returncode != 0


def test_every_alert_has_a_test_that_sees_it_fire():
    tested = {
        test["alertname"]
        for case in yaml.safe_load(TESTS.read_text())["tests"]
        for test in case.get("alert_rule_test", [])
        if test["exp_alerts"]
    }
    assert {alert["alert"] for alert in ALERTS} == tested


def test_every_runbook_exists():
    headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for alert in ALERTS:
        document, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert document == "docs/operations.md"
        assert anchor in anchors, alert["alert"]


def test_the_dashboard_is_up_to_date():
    expected = dashboard()
    assert expected == BOARD, "run `pdserve k8s dashboard --out k8s/overlays/monitoring/dashboard.json`"


def test_prometheus_parses_every_panel(tool, tmp_path):
    """Each expression becomes a recording rule, which promtool must accept."""
    queries = [target["expr"] for panel in panels(BOARD) for target in panel.get("targets", [])]
    assert len(queries) > 40
    rules = [
        {"record": f"panel:{index}", "expr": query.replace("$__rate_interval", "1m")}
        for index, query in enumerate(queries)
    ]
    path = tmp_path / "panels.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = promtool(tool, "check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(path.read_text().replace("sum(", "sum((", 1))
    assert promtool(tool, "check", "rules", path).returncode != 0


def test_every_metric_named_is_one_of_the_catalogue():
    named = [(name, expr) for name, expr in expressions(RULE)]
    named += [(panel["title"], target["expr"]) for panel in panels(BOARD) for target in panel.get("targets", [])]
    assert [(name, unknown_metrics(expr)) for name, expr in named if unknown_metrics(expr)] == []
    used = {metric for _, expr in named for metric in metrics_of(expr)}
    assert len(used) > 40


def test_labels_named_are_those_of_the_catalogue():
    """`sum by (stage)` over a metric without that label would be one nameless line."""
    known = {series: set(spec.labels) for spec in CATALOGUE.values() for series in spec.series}
    exprs = [expr for _, expr in expressions(RULE)]
    exprs += [target["expr"] for panel in panels(BOARD) for target in panel.get("targets", [])]
    checked = 0
    for expr in exprs:
        metrics = metrics_of(expr)
        if not metrics:
            continue
        labels = set().union(*(known[metric] for metric in metrics)) | {"le", "instance", "job"}
        for clause in re.findall(r"by \(([^)]*)\)", expr):
            wanted = {label.strip() for label in clause.split(",")}
            assert wanted <= labels, expr
            checked += len(wanted)
        for label in re.findall(r"[{,]\s*([a-z_]+)\s*=", expr):
            assert label in labels, expr
    assert checked > 20


def test_goodput_comes_first():
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Goodput", "Latency and stages", "Pools", "KV transfer", "Prefix cache"]
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in BOARD["panels"]]
    assert len(set(places)) == len(places)

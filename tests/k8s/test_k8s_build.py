"""Every overlay builds, and servers, operators and our own rules accept what it builds."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml
from k8s_server import NEWEST, OLDEST, mistakes, server_mistakes

from cluster.config import load
from cluster.kubernetes.manifests import load as load_manifests
from cluster.kubernetes.render import component

ROOT = Path(__file__).resolve().parents[2]
RENDERED = ("cpu-demo", "gpu")


@pytest.mark.parametrize("name", ["cpu-demo", "gpu", "monitoring"])
def test_an_overlay_is_accepted(name, overlays, crds):
    assert len(overlays[name]) >= 4
    assert mistakes(overlays[name], crds) == []


@pytest.mark.parametrize("name", RENDERED)
def test_monitoring_fits_beside_every_overlay(name, overlays, crds):
    assert mistakes([*overlays[name], *overlays["monitoring"]], crds) == []


def test_supported_versions_are_those_the_schemas_name():
    from kubernetes_validate.utils import all_versions

    known = {version.rsplit(".", 1)[0] for version in all_versions()}
    assert {OLDEST, NEWEST} <= known
    assert max(known, key=lambda v: int(v.split(".")[1])) == NEWEST


def test_an_unknown_kind_is_a_failure(crds):
    manifest = {"apiVersion": "example.com/v1", "kind": "Surprise", "metadata": {"name": "x"}}
    assert len(server_mistakes(manifest, crds)) == 2


@pytest.mark.parametrize("name", RENDERED)
def test_what_is_rendered_is_up_to_date(name):
    folder = ROOT / "k8s" / "overlays" / name
    expected = component(load(folder / "config.yaml"), "config.yaml")
    assert (folder / "rendered" / "kustomization.yaml").read_text() == expected, "run `make k8s-render`"


def test_overlays_find_images_in_the_same_places():
    texts = {(ROOT / "k8s" / "overlays" / name / "image-paths.yaml").read_text() for name in RENDERED}
    assert len(texts) == 1


def test_every_kustomization_is_covered():
    folders = {path.parent.name for path in (ROOT / "k8s" / "overlays").glob("*/kustomization.yaml")}
    assert folders == {"cpu-demo", "gpu", "monitoring"}


def test_fault_tolerance_component(overlay_copy, build, crds):
    kustomization = overlay_copy / "overlays" / "gpu" / "kustomization.yaml"
    text = kustomization.read_text()
    kustomization.write_text(text.replace("  # - ../../components/gcs", "  - ../../components/gcs"))
    manifests = build(kustomization.parent)
    service = next(m for m in manifests if m["kind"] == "RayService")
    assert service["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]["redisAddress"] == "redis:6379"
    assert {m["kind"] for m in manifests} >= {"StatefulSet", "Service"}
    assert mistakes(manifests, crds) == []


def test_a_colocated_config_has_no_prefill_group_and_no_budget_for_it(overlay_copy, build, crds):
    folder = overlay_copy / "overlays" / "cpu-demo"
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    raw["pools"]["prefill"] = None
    (folder / "config.yaml").write_text(yaml.safe_dump(raw))
    text = component(load(folder / "config.yaml"), "config.yaml")
    (folder / "rendered" / "kustomization.yaml").write_text(text)
    manifests = build(folder)
    service = next(m for m in manifests if m["kind"] == "RayService")
    groups = [group["groupName"] for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]]
    assert groups == ["router", "decode"]
    assert not any(m["metadata"]["name"] == "pdserve-prefill" for m in manifests)
    assert mistakes(manifests, crds) == []


def test_a_base_whose_groups_moved_is_refused_by_kustomize(overlay_copy, tool):
    import subprocess

    base = overlay_copy / "base" / "rayservice.yaml"
    base.write_text(base.read_text().replace("groupName: prefill", "groupName: other"))
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(overlay_copy / "overlays" / "cpu-demo")], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "test failed" in done.stderr


def test_a_ray_field_that_may_not_change_is_refused_on_update(overlays, crds):
    service = next(m for m in overlays["gpu"] if m["kind"] == "RayService")
    old, new = copy.deepcopy(service), copy.deepcopy(service)
    old["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"] = {"backend": "redis", "redisAddress": "redis:6379"}
    new["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"] = {"backend": "rocksdb"}
    custom = crds[(service["apiVersion"], service["kind"])]
    assert custom.mistakes(new) == []
    assert any("immutable" in line for line in custom.mistakes(new, old=old))


def test_defaults_are_applied_before_rules(crds):
    custom = crds[("ray.io/v1", "RayCluster")]
    pod = {"spec": {"containers": [{"name": "x", "image": "y:1"}]}}
    cluster = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "x"},
        "spec": {
            "headGroupSpec": {"template": pod, "rayStartParams": {}},
            "workerGroupSpecs": [{"groupName": "a", "template": pod, "rayStartParams": {}}],
        },
    }
    assert custom.mistakes(cluster) == []
    cluster["spec"]["workerGroupSpecs"][0]["minReplicas"] = 2**31
    assert any("does not fit int32" in line for line in custom.mistakes(cluster))


def test_lists_are_unpacked():
    text = "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Secret, metadata: {name: a}}]\n"
    assert [m["kind"] for m in load_manifests(text)] == ["Secret"]

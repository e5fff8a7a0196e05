"""What Ray makes of the manifests: its Serve schema, its autoscaler's own reading, and the deployments' demands."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from cluster.config import load, parse
from cluster.errors import ConfigError
from cluster.kubernetes.groups import deletion_delay_s, environment, groups
from cluster.kubernetes.serve_config import serve_config, serve_config_text

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {name: ROOT / "k8s" / "overlays" / name / "config.yaml" for name in ("cpu-demo", "gpu")}
ON_PODS = {
    "engine": {"device": "gpu"},
    "router": {"node_resource": "router-pod", "http": {"host": "0.0.0.0"}},
}


def with_pools(**pools):
    return parse({**ON_PODS, "pools": pools})


@pytest.fixture(params=sorted(CONFIGS))
def name(request):
    return request.param


@pytest.fixture
def service(name, overlays):
    return next(m for m in overlays[name] if m["kind"] == "RayService")


def paths(value, at=()):
    """Every key of a nested value, as a path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*at, key)
            yield from paths(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from paths(item, (*at, index))


def lost_keys(raw):
    """Keys that Ray's schema reads past without a word."""
    from ray.serve.schema import ServeDeploySchema

    kept = ServeDeploySchema.model_validate(raw).model_dump(exclude_unset=True)
    return sorted(set(paths(raw)) - set(paths(kept)), key=str)


def test_serve_config_passes_rays_schema_and_loses_no_key(name, service):
    raw = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert lost_keys(raw) == []
    assert raw == serve_config(load(CONFIGS[name]))


@pytest.mark.parametrize(
    "path", [(), ("http_options",), ("logging_config",), ("applications", 0)], ids=lambda path: ".".join(map(str, path))
)
def test_a_lost_key_would_be_seen(path):
    raw = serve_config(load(CONFIGS["gpu"]))
    node = raw
    for step in path:
        node = node[step]
    node["prot"] = 1
    try:
        assert lost_keys(raw) == [(*path, "prot")]
    except ValueError:
        pass  # this part of Ray's schema refuses it by itself


def test_the_config_inside_is_the_file(name):
    text = serve_config_text(load(CONFIGS[name]))
    inside = yaml.safe_load(text)["applications"][0]["args"]["config"]
    assert parse(inside) == load(CONFIGS[name])


def test_rays_autoscaler_reads_the_groups_as_intended(name, service):
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    cluster = {
        "metadata": {"name": "pdserve-x", "namespace": "pdserve"},
        "spec": service["spec"]["rayClusterConfig"],
    }
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    expected = groups(load(CONFIGS[name]))
    assert set(types) == {"headgroup", *expected}
    assert types["headgroup"]["resources"]["CPU"] == 0
    for group in expected.values():
        seen = types[group.name]
        assert (seen["min_workers"], seen["max_workers"]) == (group.pods_min, group.pods_max)
        assert seen["labels"] == {"pdserve.io/pool": group.name}
        assert seen["idle_timeout_s"] == 300
        resources = {key: value for key, value in seen["resources"].items() if key != "memory"}
        assert resources == {key: int(value) for key, value in group.resources.items()}


def test_names_are_those_of_the_application(name):
    from cluster.app import build
    from router.app import DEPLOYMENTS, ROUTER

    assert set(groups(load(CONFIGS[name]))) == {ROUTER, *DEPLOYMENTS.values()}
    module, _, attribute = serve_config(load(CONFIGS[name]))["applications"][0]["import_path"].partition(":")
    assert (build.__module__, build.__name__) == (module, attribute)


def test_a_pod_holds_one_replica_of_its_own_deployment_and_no_other(name):
    config = load(CONFIGS[name])
    found = groups(config)
    demands = demands_of(config)
    for deployment, asked in demands.items():
        fitting = {
            group.name
            for group in found.values()
            if all(float(group.resources.get(key, 0)) >= amount for key, amount in asked.items())
        }
        assert fitting == {deployment}
        offered = found[deployment].resources
        most = min(math.floor(float(offered[key]) / amount) for key, amount in asked.items() if amount)
        assert most == 1


def demands_of(config):
    """Ray resources that one replica of each deployment asks for, from the application itself."""
    from cluster.app import build

    application = build({"config": config.model_dump(mode="json")})
    found = {}

    def visit(node):
        deployment = node._bound_deployment
        options = deployment.ray_actor_options or {}
        asked = {"CPU": options.get("num_cpus") or 0, "GPU": options.get("num_gpus") or 0}
        asked |= options.get("resources") or {}
        bundles = getattr(deployment._replica_config, "placement_group_bundles", None)
        if bundles:
            asked = {}
            for bundle in bundles:
                for key, amount in bundle.items():
                    asked[key] = asked.get(key, 0) + amount
        elif options.get("accelerator_type"):
            asked[f"accelerator_type:{options['accelerator_type']}"] = 0.001
        found[deployment.name] = {key: amount for key, amount in asked.items() if amount}
        for argument in (*node._bound_deployment.init_args, *node._bound_deployment.init_kwargs.values()):
            if hasattr(argument, "_bound_deployment"):
                visit(argument)

    visit(application)
    return found


def test_every_container_has_the_environment_of_the_command(name, service):
    config = load(CONFIGS[name])
    spec = service["spec"]["rayClusterConfig"]
    templates = [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    for template in templates:
        found = {v["name"]: v.get("value") for v in template["spec"]["containers"][0]["env"]}
        assert environment(config).items() <= found.items()
        assert "RAY_SERVE_ENABLE_DIRECT_INGRESS" not in found


def test_ray_is_one_version_everywhere(service):
    import ray

    locks = [(ROOT / "requirements" / f"{kind}.lock").read_text().splitlines() for kind in ("cpu", "gpu")]
    assert service["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__
    assert all(f"ray=={ray.__version__}" in lines for lines in locks)


@pytest.mark.parametrize(
    ("layout", "pods", "gpus"),
    [
        ({"tp": 1}, 1, 1),
        ({"tp": 8}, 1, 8),
        ({"tp": 4, "pp": 2}, 1, 8),
        ({"tp": 8, "pp": 2}, 2, 8),
        ({"tp": 2, "dp": 4}, 1, 8),
    ],
)
def test_pods_of_one_replica(layout, pods, gpus):
    found = groups(with_pools(decode={"layout": layout, "replicas": {"min": 2, "max": 3}, "accelerator": "H100"}))
    assert (found["decode"].pods_min, found["decode"].pods_max) == (2 * pods, 3 * pods)
    assert found["decode"].gpus == gpus
    assert found["decode"].resources["GPU"] == str(gpus)


def test_the_four_timers_are_in_order():
    config = load(CONFIGS["gpu"])
    for group in groups(config).values():
        assert group.drain_s < group.node_drain_s < group.grace_s
        assert group.drain_s < deletion_delay_s(config)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": {"device": "auto"}}, "engine.device: auto"),
        ({"router": {"node_resource": "router-pod"}}, "router.http.host: 127.0.0.1"),
        ({"router": {"http": {"host": "0.0.0.0"}}}, "router.node_resource: null"),
        ({"router": {"node_resource": "r", "http": {"host": "0.0.0.0", "ingress": "direct"}}}, "router.http.ingress"),
        ({"engine": {"device": "cpu"}}, "pools.prefill.accelerator: null"),
        ({"pools": {"decode": {"layout": {"tp": 16}}}}, "pools.decode.layout: tp 16"),
        ({"pools": {"decode": {"layout": {"tp": 16}, "accelerator": "H100"}}}, "pools.decode.layout: tp 16"),
    ],
)
def test_what_no_pod_can_hold_is_one_line(change, words):
    with pytest.raises(ConfigError) as caught:
        groups(parse({**ON_PODS, **change}))
    assert words in str(caught.value)

"""A mistake in the YAML is one line: dotted path, value, bound, remedy."""

from __future__ import annotations

import pytest

from cluster.config import load, parse
from cluster.errors import ConfigError
from cluster.messages import Role


def test_defaults_are_one_prefill_and_one_decode_engine_of_the_embedded_model() -> None:
    config = parse({})
    assert config.model.id == "embedded"
    assert config.pool(Role.PREFILL).replicas.start == config.pool(Role.DECODE).replicas.start == 1
    assert config.router.http.host == "127.0.0.1"


def test_no_prefill_pool_is_colocated() -> None:
    config = parse({"pools": {"prefill": None}})
    assert config.colocated
    with pytest.raises(ConfigError, match=r"pools\.prefill: is null"):
        config.pool(Role.PREFILL)


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"pols": {}}, "pols: unknown key; did you mean `pools`?"),
        ({"pools": {"prefil": {}}}, "pools.prefil: unknown key; did you mean `prefill`?"),
        ({"pools": {"decode": {"replicas": {"min": 3, "max": 2}}}}, "pools.decode.replicas: min 3 is above max 2"),
        ({"pools": {"decode": {"layout": {"tp": 0}}}}, "pools.decode.layout.tp: 0: input should be greater than"),
        ({"slo": {"ttft_ms": "5s"}}, "slo.ttft_ms: '5s': input should be a valid number"),
        ({"slo": {"ttft_ms": float("nan")}}, "slo.ttft_ms: nan"),
        ({"name": "Bad Name"}, "name: 'Bad Name'"),
        ([], "(top level): is a list, not a mapping"),
    ],
)
def test_each_mistake_names_field_value_and_bound(raw: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(raw)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_one_line(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [1, 2")
    with pytest.raises(ConfigError, match="is not valid YAML at line"):
        load(tmp_path / "bad.yaml")

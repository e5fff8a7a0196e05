"""What an engine is given for KV transfer, and ports that replicas of one node never share."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from typing import Any

import pytest

from cluster.config import LayoutConfig, parse
from cluster.errors import ConfigError, UserError
from cluster.messages import Role
from kv_transfer import ports
from kv_transfer.settings import PortPlan, engine_transfer, ports_needed

PLAN = PortPlan(20_000, dp=2)


def transfer(role: Role = Role.PREFILL, *, on_cpu: bool = True, **raw: Any):  # type: ignore[no-untyped-def]
    return engine_transfer(parse(raw), role, host="10.0.0.7", ports=PLAN, on_cpu=on_cpu)


def test_roles_lease_and_failure_policy() -> None:
    kv = {"lease_s": 12.5, "on_failure": "fail", "extra": {"backends": ["UCX", "GDS"]}}
    for role, kv_role in ((Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")):
        settings = transfer(role, kv_transfer=kv).kv_transfer_config
        assert settings == {
            "kv_connector": "NixlConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": "fail",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": 13, "backends": ["UCX", "GDS"]},
        }


def test_gpu_engines_keep_kv_on_the_gpu_and_get_no_cpu_switches() -> None:
    found = transfer(on_cpu=False)
    assert "kv_buffer_device" not in found.kv_transfer_config
    assert not any(name.startswith("PDSERVE_CPU_") for name in found.environment)
    assert found.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.7"
    assert found.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "20000"


def test_cpu_switches_follow_the_configuration() -> None:
    on = {name for name in transfer().environment if name.startswith("PDSERVE_CPU_")}
    assert len(on) == 3
    engine = {"cpu": {"relax_ucx_polling": False}}
    left = {name for name in transfer(engine=engine).environment if name.startswith("PDSERVE_CPU_")}
    assert on - left == {"PDSERVE_CPU_RELAX_UCX_POLLING"}


def test_a_colocated_engine_transfers_nothing() -> None:
    found = transfer(Role.DECODE, pools={"prefill": None})
    assert found.kv_transfer_config is None
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in found.environment


def test_ports_of_dp_ranks_do_not_overlap() -> None:
    layout = LayoutConfig(dp=2)
    used = [first + rank for first in (PLAN.side_channel, PLAN.kv_events, PLAN.kv_replay) for rank in range(2)]
    assert sorted(used) == list(range(20_000, 20_000 + ports_needed(layout)))


def test_reservations_on_one_node_never_overlap() -> None:
    held = [ports.reserve(3, lowest=21_000, highest=21_029, rng=random.Random(seed)) for seed in range(8)]
    try:
        taken = [port for reservation in held for port in reservation.ports]
        assert len(taken) == len(set(taken)) == 24
        assert all(21_000 <= port <= 21_029 for port in taken)
        assert all(reservation.ports.step == 1 for reservation in held)
    finally:
        for reservation in held:
            reservation.close()


def test_a_port_that_somebody_listens_on_is_passed_over() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match="no 1 consecutive free ports"):
            ports.reserve(1, lowest=port, highest=port)
    with ports.reserve(1, lowest=port, highest=port) as reservation:
        assert reservation.first == port


def test_closing_gives_ports_back_and_full_is_one_line() -> None:
    with ports.reserve(3, lowest=21_100, highest=21_102), pytest.raises(UserError) as refused:
        ports.reserve(1, lowest=21_100, highest=21_102)
    assert "kv_transfer.port_min" in str(refused.value)
    assert "\n" not in str(refused.value)
    ports.reserve(3, lowest=21_100, highest=21_102).close()


def test_another_process_sees_a_reservation_and_death_ends_it() -> None:
    code = (
        "from kv_transfer import ports\n"
        "held = ports.reserve(3, lowest=21_200, highest=21_202); print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError):
            ports.reserve(1, lowest=21_200, highest=21_202)
        child.kill()
        child.wait()
    ports.reserve(3, lowest=21_200, highest=21_202).close()


def test_a_range_that_is_upside_down_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="port_min 30000 is above port_max 20000"):
        parse({"kv_transfer": {"port_min": 30_000, "port_max": 20_000}})

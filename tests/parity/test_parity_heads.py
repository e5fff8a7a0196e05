"""Our KV head map against the connector's own: for every pair that it takes, the same reads."""

from __future__ import annotations

import itertools

import pytest

from kv_transfer.compatibility import check_pair
from kv_transfer.heads import heads_of, reads

# vLLM warns about its own imports.
pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]

SIZES = (1, 2, 4, 8)


def fingerprint(total: int, tp: int) -> dict[str, object]:
    return {"kv_heads": total, "latent": False, "tp": tp, "pp": 1}


ACCEPTED = [
    (total, prefill, decode)
    for total, prefill, decode in itertools.product(SIZES, SIZES, SIZES)
    if not check_pair(fingerprint(total, prefill), fingerprint(total, decode), tp_pairs="connector")
]


@pytest.mark.parametrize(("total", "prefill_tp", "decode_tp"), ACCEPTED)
def test_reads_equal_the_connectors(total: int, prefill_tp: int, decode_tp: int) -> None:
    from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    for rank in range(decode_tp):
        topology = TransferTopology(
            tp_rank=rank,
            tp_size=decode_tp,
            block_size=16,
            engine_id="decode",
            is_mla=False,
            is_mamba=False,
            total_num_kv_heads=total,
            attn_backends=[],
        )
        theirs = compute_tp_mapping(topology, prefill_tp, (FullAttentionSpec,))
        ours = [read for read in reads(total, prefill_tp, decode_tp) if read.decode_rank == rank]
        assert {read.prefill_rank for read in ours} == set(theirs.all_source_ranks)
        if decode_tp > prefill_tp:
            # One source; the connector starts at `rank_offset_factor` times the heads it reads.
            first = theirs.rank_offset_factor * len(heads_of(rank, total, decode_tp))
            assert [read.prefill_slot for read in ours] == list(range(first, first + len(ours)))

"""Runs inside vLLM's worker processes: frees KV that nobody will pull, without waiting for NIXL's lease.

vLLM mixes this class into its worker (`worker_extension_cls`); the engine reaches it with `collective_rpc`.
Upstream, a prefill engine learns only from a decode engine that its KV is not needed. When that decode engine
is dead there is nobody to say so and the blocks stay pinned for the whole lease.
"""

from __future__ import annotations

from typing import Any


class LeaseExtension:
    def pdserve_release_kv(self, request_ids: list[str]) -> int:
        """Report these finished prefills as sent, so that the scheduler frees their blocks. Idempotent.

        Returns:
            How many of them were still pinned on this rank.
        """
        worker = _nixl_worker()
        if worker is None:
            return 0
        pending = _released(worker)
        pinned = [r for r in request_ids if r in worker._reqs_to_send or r in worker._reqs_to_process]
        pending.update(pinned)
        return len(pinned)

    def pdserve_pinned_kv(self) -> int:
        """How many finished prefills this rank still keeps for a decode engine."""
        worker = _nixl_worker()
        return 0 if worker is None else len(worker._reqs_to_send)


def _nixl_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "connector_worker", None) if has_kv_transfer_group() else None


def _released(worker: Any) -> set[str]:
    """The set of ids to report as sent with the next poll; installs the hook on first use."""
    pending: set[str] | None = getattr(worker, "pdserve_released", None)
    if pending is not None:
        return pending
    pending = worker.pdserve_released = set()
    poll = worker._get_new_notifs

    def poll_with_released() -> set[str]:
        done: set[str] = poll()
        for request_id in pending - done:
            if request_id in worker._reqs_to_send or request_id in worker._reqs_to_process:
                # The same bookkeeping as for a pull that was reported by its reader.
                worker._reqs_to_process.discard(request_id)
                worker._reqs_to_send.pop(request_id, None)
                worker.consumer_notification_counts_by_req.pop(request_id, None)
                worker.expected_consumer_notifications_by_req.pop(request_id, None)
                done.add(request_id)
        pending.clear()
        return done

    worker._get_new_notifs = poll_with_released
    return pending

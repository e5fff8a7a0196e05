"""Requests that wait in the router: moves them through `Admission` on the event loop. No decisions here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.messages import Rejection, Request
from router.admission import Admission, Queue

LOOK_EVERY_S = 0.01
"""Time alone may open the gate: predicted queues drain without any event. Reports of load, one for every step of every
engine, are no reason to look before; cluster/sim/fleet.py does the same."""


class WaitingRoom:
    """
    Args:
        place: starts a request that may go now; called inside `pump` and nowhere else.
        refuse: ends a request that waited.
        clock: seconds, the router's.
    """

    def __init__(
        self,
        admission: Admission,
        place: Callable[[Request], None],
        refuse: Callable[[Request, Rejection], None],
        clock: Callable[[], float],
    ) -> None:
        self.admission = admission
        self._place, self._refuse, self._clock = place, refuse, clock
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False

    def __len__(self) -> int:
        return len(self.admission)

    def enter(self, request: Request) -> Rejection | bool:
        """True: go now. False: it waits, and `place` or `refuse` will be called for it."""
        verdict = self.admission.offer(request, self._clock())
        if isinstance(verdict, Rejection):
            return verdict
        if isinstance(verdict, Queue):
            # Not here: the caller is in the middle of this request's own actions.
            asyncio.get_running_loop().call_soon(self.pump)
            return False
        return True

    def leave(self, request_id: str) -> None:
        """A request is over or cancelled; unknown ids are ignored."""
        if len(self.admission):
            self.admission.remove(request_id)

    def pump(self) -> None:
        """Place whatever may go; call it when a request has ended on an engine. Costs nothing while nobody waits."""
        if self._pumping or not len(self.admission):
            return
        self._pumping = True
        try:
            while (request := self.admission.next(self._clock())) is not None:
                self._place(request)
            for refusal in self.admission.refusals(self._clock()):
                self._refuse(refusal.request, refusal.rejection)
        finally:
            self._pumping = False
            if len(self.admission) and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._tick)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        self.pump()

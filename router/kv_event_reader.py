"""Moves KV events from engines' ZMQ sockets into `KvEventStream`s. No decisions here."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from cluster.messages import WorkerInfo
from router.kv_events import KvEventStream, Quality
from router.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)
_END = (-1).to_bytes(8, "big", signed=True)
_TICK_S = 0.1


class KvEventReader:
    """Keeps one subscription per engine incarnation; everything runs on the caller's event loop.

    Args:
        index: written by the streams.
        block_tokens: tokens per key of the index.
        on_quality: told (worker_id, quality) when a worker's index becomes exact or stops being so.
        clock: seconds, the router's.
    """

    def __init__(
        self,
        index: PrefixIndex,
        block_tokens: int,
        on_quality: Callable[[str, Quality], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index, self._block_tokens, self._on_quality, self._clock = index, block_tokens, on_quality, clock
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.streams: dict[str, KvEventStream] = {}

    def add(self, info: WorkerInfo) -> None:
        """Follow an engine; one whose events are off is reported as approximate."""
        self.remove(info.worker_id)
        if info.kv_events_endpoint is None:
            self._on_quality(info.worker_id, Quality.APPROXIMATE)
            return
        self._index.clear(info.worker_id)
        replay = info.kv_replay_endpoint
        stream = KvEventStream(
            info.worker_id, self._index, self._block_tokens, replayable=replay is not None, now=self._clock()
        )
        self.streams[info.worker_id] = stream
        self._tasks[info.worker_id] = asyncio.get_running_loop().create_task(
            self._follow(info.worker_id, stream, info.kv_events_endpoint, replay), name=f"kv-events {info.worker_id}"
        )

    def remove(self, worker_id: str) -> None:
        """Stop following; the caller clears the index if the engine is gone. Unknown ids are ignored."""
        self.streams.pop(worker_id, None)
        task = self._tasks.pop(worker_id, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for worker_id in list(self._tasks):
            self.remove(worker_id)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.term()

    async def _follow(self, worker_id: str, stream: KvEventStream, endpoint: str, replay: str | None) -> None:
        live = self._context.socket(zmq.SUB)
        asked = self._context.socket(zmq.DEALER)
        for socket in (live, asked):
            socket.linger = 0
            socket.rcvhwm = 0  # the stream bounds what it holds; dropping here would only open gaps
        poller = zmq.asyncio.Poller()
        poller.register(live, zmq.POLLIN)
        poller.register(asked, zmq.POLLIN)
        quality: Quality | None = None
        try:
            live.subscribe(b"")
            live.connect(endpoint)
            if replay is not None:
                asked.connect(replay)
            while True:
                start = stream.replay_from(self._clock())
                if start is not None:
                    await asked.send_multipart((b"", start.to_bytes(8, "big")))
                if quality is not stream.quality:
                    quality = stream.quality
                    self._on_quality(worker_id, quality)
                ready = dict(await poller.poll(timeout=_TICK_S * 1e3))
                if asked in ready:
                    await self._drain(asked, stream, replayed=True)
                if live in ready:
                    await self._drain(live, stream, replayed=False)
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("KV events of %s cannot be followed; its index is approximate now", worker_id)
            self._index.clear(worker_id)
            self._on_quality(worker_id, Quality.APPROXIMATE)
        finally:
            live.close()
            asked.close()

    async def _drain(self, socket: zmq.asyncio.Socket, stream: KvEventStream, *, replayed: bool) -> None:
        """Take what has arrived, a bounded number at a time so that other tasks run in between."""
        for _ in range(16):
            try:
                frames = await socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) < 3:
                continue
            number, payload = frames[-2], frames[-1]
            now = self._clock()
            if not replayed:
                stream.on_batch(int.from_bytes(number, "big"), payload, now)
            elif number == _END:
                stream.on_replay_end(now)
            else:
                stream.on_replay(int.from_bytes(number, "big"), payload, now)

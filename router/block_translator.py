"""One engine's KV events in terms of our block keys.

An engine names a block by its own hash; the tokens in the event tell what it holds. A block's key continues its
parent's key, a first block starts from the namespace (cache salt, adapter) in its extra keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.block_keys import block_keys, extend_keys, namespace
from router.prefix_index import PrefixIndex


@dataclass(slots=True)
class EventCounts:
    batches: int = 0
    duplicates: int = 0
    gaps: int = 0
    resyncs: int = 0
    epochs: int = 0
    unresolved_blocks: int = 0
    malformed: int = 0


class BlockTranslator:
    """One engine's block hashes in terms of our keys; applies its events to the index.

    An engine block of r times `block_tokens` is r keys; an engine block that is smaller than ours, or no multiple of
    it, cannot be translated and is counted as unresolved, as are blocks whose hash holds more than tokens, salt and
    adapter (images, prompt embeddings).
    """

    def __init__(self, worker_id: str, index: PrefixIndex, block_tokens: int, counts: EventCounts) -> None:
        self._worker_id, self._index, self._block_tokens, self._counts = worker_id, index, block_tokens, counts
        self._keys: dict[int, int | tuple[int, ...]] = {}
        # An engine may compute the same block twice, side by side: it announces and removes each copy.
        self._copies: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def clear(self) -> None:
        self._keys.clear()
        self._copies.clear()
        self._index.clear(self._worker_id)

    def apply(self, events: Sequence[Any]) -> None:
        """Raises ValueError, TypeError or KeyError for what is no event."""
        removed: list[int] = []
        for event in events:
            kind, get = _fields(event)
            if kind == "BlockRemoved":
                if _on_device(get):
                    self._removed(get("block_hashes"), removed)
                continue
            if removed:
                self._index.remove(self._worker_id, removed)
                removed = []
            if kind == "BlockStored":
                if _on_device(get):
                    self._stored(get)
            elif kind == "AllBlocksCleared":
                self.clear()
            else:
                raise ValueError(f"unknown event {kind!r}")
        if removed:
            self._index.remove(self._worker_id, removed)

    def _stored(self, get: Any) -> None:
        hashes = [_short(h) for h in get("block_hashes")]
        tokens, size = get("token_ids"), get("block_size")
        ratio, rest = divmod(size, self._block_tokens)
        if not hashes:
            return
        if rest or not ratio or len(tokens) != size * len(hashes):
            self._counts.unresolved_blocks += len(hashes)
            return
        parent_hash = get("parent_block_hash")
        extra = get("extra_keys")
        if parent_hash is None:
            space = _namespace(extra[0] if extra else None, get("lora_name"))
            if space is None or not _plain(extra, get("lora_name"), 1):
                self._counts.unresolved_blocks += len(hashes)
                return
            parent = None
            keys = block_keys(tokens, self._block_tokens, space)
        else:
            known = self._keys.get(_short(parent_hash))
            if known is None or not _plain(extra, get("lora_name"), 0):
                self._counts.unresolved_blocks += len(hashes)
                return
            parent = known if isinstance(known, int) else known[-1]
            keys = extend_keys(parent, tokens, self._block_tokens)
        mine, copies = self._keys, self._copies
        for i, short in enumerate(hashes):
            if short in mine:
                copies[short] = copies.get(short, 1) + 1
            mine[short] = keys[i] if ratio == 1 else keys[i * ratio : (i + 1) * ratio]
        self._index.store(self._worker_id, keys, parent)

    def _removed(self, hashes: Sequence[Any], removed: list[int]) -> None:
        for full in hashes:
            short = _short(full)
            copies = self._copies.get(short)
            if copies is not None:
                if copies > 2:
                    self._copies[short] = copies - 1
                else:
                    del self._copies[short]
                continue
            keys = self._keys.pop(short, None)
            if keys is None:
                continue
            if isinstance(keys, int):
                removed.append(keys)
            else:
                removed.extend(reversed(keys))


_ORDER = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}  # fmt: skip
"""Field order where events come as arrays (older engines); newer ones send maps."""


def _fields(event: Any) -> tuple[str, Any]:
    if isinstance(event, Mapping):
        return event["type"], event.get
    kind = event[0]
    return kind, dict(zip(_ORDER[kind], event[1:], strict=False)).get


def _on_device(get: Any) -> bool:
    """Only the engine's own first-tier KV of its first cache group counts; offloaded copies must be loaded first."""
    return get("medium") in (None, "GPU") and get("locality") in (None, "LOCAL") and not get("group_idx")


def _namespace(extra: Sequence[Any] | None, adapter: str | None) -> bytes | None:
    """The namespace of a first block: its extra keys are the adapter, if any, then the salt, if any."""
    rest = list(extra or ())
    if adapter is not None and rest and rest[0] == adapter:
        rest.pop(0)
    if len(rest) > 1 or (rest and not isinstance(rest[0], str)):
        return None
    return namespace(rest[0] if rest else None, adapter)


def _plain(extra: Sequence[Any] | None, adapter: str | None, start: int) -> bool:
    """Whether blocks from `start` on hash nothing but tokens and adapter."""
    if not extra:
        return True
    return all(not keys or (len(keys) == 1 and keys[0] == adapter) for keys in extra[start:])


def _short(block_hash: Any) -> int:
    """64 bits of an engine's hash name a block of one engine well enough, in a fifth of the memory."""
    if isinstance(block_hash, int):
        return block_hash
    return int.from_bytes(block_hash[:8], "little")

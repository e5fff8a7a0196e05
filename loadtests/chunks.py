"""The JSON of streamed OpenAI chunks, reduced to what a load test needs. Unknown fields are skipped unread."""

from __future__ import annotations

from typing import Any

import msgspec


class PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        d = self.delta
        return bool(self.text or (d and (d.content or d.reasoning or d.reasoning_content or d.tool_calls)))


class Chunk(msgspec.Struct):
    id: str | None = None
    object: str | None = None
    message: Any = None
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None

    @property
    def failure(self) -> str | None:
        """The error that an event reports inside a stream that began with status 200."""
        if self.error:
            message = self.error.get("message") if isinstance(self.error, dict) else None
            return str(message or self.error)
        return str(self.message) if self.object == "error" else None


decode_chunk = msgspec.json.Decoder(Chunk).decode

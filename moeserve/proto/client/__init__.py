"""`MoeClient` for threads and `AsyncMoeClient` for asyncio, with what calls take and give."""

from __future__ import annotations

from moeserve.proto.client.aio import AsyncMoeClient
from moeserve.proto.client.batch import Choice, Logits, Reply
from moeserve.proto.client.patience import Patience
from moeserve.proto.client.sync import MoeClient
from moeserve.proto.transports.shared_memory import SharedTensor

__all__ = ["AsyncMoeClient", "Choice", "Logits", "MoeClient", "Patience", "Reply", "SharedTensor"]

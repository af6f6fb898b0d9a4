"""`Remote`: a service answers, by gRPC or shared memory, as `MoeClient` does."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from moeserve.proto.client import Choice, Logits, MoeClient
from moeserve.torch.ways import Rows, Submitted


class Remote:
    """Rows go through the host to the service that `client` reaches, which waits and tries again."""

    def __init__(self, client: MoeClient) -> None:
        self.order = torch.zeros(1, dtype=torch.int64)
        self._client = client
        self._submitted = Submitted("moeserve-remote")
        self._devices: dict[int, torch.device] = {}  # where answers go

    def mixed(self, layer: int, rows: Rows) -> Tensor:
        """As `Way.mixed`. Raises MoeError, and TensorError for tensors that the contract does not take."""
        host = rows.on_host()
        return self._submitted.run(lambda: self._ask(layer, host)).to(rows.hidden.device)

    def submit(self, layer: int, rows: Rows) -> int:
        """As `Way.submit`; rows on a GPU are on the host when it returns, and may change."""
        host = rows.on_host()
        number = self._submitted.put(layer, lambda: self._ask(layer, host))
        self._devices = {old: self._devices[old] for old in self._submitted.numbers if old in self._devices}
        self._devices[number] = rows.hidden.device
        return number

    def wait(self, number: int) -> Tensor:
        """As `Way.wait`; bounded by the client's timeout."""
        answer = self._submitted.take(number)
        return answer.to(self._devices.pop(number))  # on the caller's stream, which goes on to use it

    def close(self) -> None:
        """Closes the client."""
        self._submitted.close()
        self._client.close()

    def _ask(self, layer: int, rows: Rows) -> Tensor:
        if not rows.hidden.shape[0]:
            return torch.empty_like(rows.hidden)
        route = Logits(rows.route) if rows.weights is None else Choice(rows.route, rows.weights)
        reply = self._client.call(layer, rows.hidden, route)
        return cast(Tensor, reply.hidden).clone()  # its memory may be the reply's own bytes

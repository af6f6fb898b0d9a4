"""Callers with default patience, whose every answer is compared."""

from __future__ import annotations

import threading

import torch
from houses import Alone

from moeserve.proto.client import MoeClient

SECONDS = 60.0
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


class PatientCallers:
    """Clients with default patience, one for any lane and one for each of some; every answer is compared."""

    def __init__(self, address: str, alone: Alone, lanes: list[int | None]) -> None:
        self._address, self._over = address, threading.Event()
        self._batches = [alone.batch(6, seed=seed) for seed in range(4)]
        self._right = [alone.forward(1, *batch) for batch in self._batches]
        self.answers = dict.fromkeys(lanes, 0)
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(lane,)) for lane in lanes]

    def _ask(self, lane: int | None) -> None:
        with MoeClient(self._address, lane=lane) as client:
            while not self._over.is_set():
                at = self.answers[lane] % len(self._batches)
                try:
                    found = torch.as_tensor(client.forward(1, *self._batches[at]))
                    torch.testing.assert_close(found, self._right[at], **CLOSE)
                except Exception as error:
                    self.failed.append(f"lane {lane}: {error}")
                self.answers[lane] += 1

    def __enter__(self) -> PatientCallers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive()

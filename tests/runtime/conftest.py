"""What tests of several files here ask for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from door_service import Service


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Makes doors' services with such limits, which end with the test."""
    made: list[Service] = []

    def make(**limits: Any) -> Service:
        made.append(Service(**limits))
        return made[-1]

    yield make
    for service in made:
        service.close()

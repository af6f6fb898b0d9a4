"""Both clients, and services for them: one whose lanes can share memory with this process, one far away."""

import pytest
from proto_fake import FAR, FakeService
from proto_waited import Waited

from moeserve.proto.client import MoeClient


@pytest.fixture(params=[MoeClient, Waited], ids=["sync", "async"])
def client_of(request):
    return request.param


@pytest.fixture
def service():
    made = FakeService(2)
    yield made
    made.stop()


@pytest.fixture
def far():
    made = FakeService(2, host=FAR)
    yield made
    made.stop()

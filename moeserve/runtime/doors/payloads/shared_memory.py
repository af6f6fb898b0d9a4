"""Shared memory: the payload lies in a region of this process, and the answer is written into one."""

from torch import Tensor

from moeserve.proto import moe_pb2
from moeserve.proto.tensors import Spec, TensorError, as_torch, describe_into
from moeserve.runtime.doors.payloads.region import Hold
from moeserve.runtime.doors.payloads.regions import Regions
from moeserve.runtime.doors.payloads.transport import Lent, Room, TransportEntry


class SharedMemory:
    """Views regions in place.

    Whoever fills a region can change it at any time, so what is checked is copied first.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

    def lend(self, message: moe_pb2.Tensor, spec: Spec, field: str) -> Lent:
        """A view of the region, which stays mapped and listed as in use until closed."""
        place = message.region
        hold = self._regions.hold(place.name, place.offset, place.size, field=field)
        try:
            return Lent(_view(hold, spec, field), hold.close, hold.reached, hold)
        except BaseException:
            hold.close()
            raise

    def room(self, output: moe_pb2.Region, spec: Spec) -> Room:
        """A part of a region, held until closed."""
        if output.size != spec.nbytes:
            raise TensorError(
                "output", f"a region of {output.size} bytes, but the answer {spec} takes {spec.nbytes}"
            )
        hold = self._regions.hold(output.name, output.offset, output.size, field="output")
        try:
            there = _view(hold, spec, "output")
        except BaseException:
            hold.close()
            raise

        place = moe_pb2.Region()  # one's own: a part of a message keeps all of it
        place.CopyFrom(output)

        def put(answer: Tensor, message: moe_pb2.Tensor) -> None:
            if answer.data_ptr() != there.data_ptr():
                there.copy_(answer)
            describe_into(message, spec)
            message.region.CopyFrom(place)

        return Room(put, hold.close, reached=there if hold.reached else None, hold=hold)


def _view(hold: Hold, spec: Spec, field: str) -> Tensor:
    tensor = as_torch(hold.memory, spec, field)
    if tensor.data_ptr() % spec.dtype.itemsize:
        raise TensorError(field, f"its region does not start at a multiple of {spec.dtype.itemsize} bytes")
    return tensor


def _build(regions: Regions) -> SharedMemory:
    return SharedMemory(regions)


ENTRY = TransportEntry(name="shared_memory", payload="region", build=_build)

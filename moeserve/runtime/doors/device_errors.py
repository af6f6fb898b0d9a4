"""Why a device lane cannot be had. The door answers each with the gRPC status that its docstring names."""


class NameTaken(Exception):
    """A device lane of this name is attached here (ALREADY_EXISTS)."""


class LanesTaken(Exception):
    """As many device lanes are attached here as may be (RESOURCE_EXHAUSTED)."""


class DeviceRefused(Exception):
    """Rows of such a device cannot be brought by a device lane here (FAILED_PRECONDITION)."""


class UnknownLane(LookupError):
    """No device lane has this mailbox (NOT_FOUND)."""

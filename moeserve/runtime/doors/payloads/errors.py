"""Why a region cannot be had. The door answers each with the gRPC status that its docstring names."""


class RegionError(Exception):
    """A region that cannot be had."""


class UnknownRegion(RegionError, LookupError):
    """No region has this name, or it was released (NOT_FOUND)."""


class RegionLimit(RegionError):
    """There is no room for another region (RESOURCE_EXHAUSTED)."""


class NamedRegionRefused(RegionError, PermissionError):
    """Registering by name is not allowed here (PERMISSION_DENIED)."""

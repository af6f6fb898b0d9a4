"""Transports of a payload between a caller and a rank: inline bytes and shared memory."""

from moeserve.runtime.doors.payloads.payloads import TRANSPORTS, OpenRequest, Payloads
from moeserve.runtime.doors.payloads.regions import RegionLimits, Regions

__all__ = ["TRANSPORTS", "OpenRequest", "Payloads", "RegionLimits", "Regions"]

"""Transports of a payload between a caller and a rank: inline bytes and shared memory."""

from moeserve.runtime.tensors.payloads import TRANSPORTS, OpenRequest, Payloads
from moeserve.runtime.tensors.regions import RegionLimits, Regions

__all__ = ["TRANSPORTS", "OpenRequest", "Payloads", "RegionLimits", "Regions"]

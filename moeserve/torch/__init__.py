"""Remote experts as a module of torch: eager, under torch.compile, with other work meanwhile.

way = connect(Settings(mode="remote", address="127.0.0.1:50051"))
experts = MoeExperts(way, layer=3)
mixed = experts(hidden, ids, weights)  # [T, H], like hidden
"""

from __future__ import annotations

from moeserve.torch.connecting import MODES, Settings, connect
from moeserve.torch.module import MoeExperts, Ticket
from moeserve.torch.ways import Rows, Way, WrongRows

__all__ = ["MODES", "MoeExperts", "Rows", "Settings", "Ticket", "Way", "WrongRows", "connect"]

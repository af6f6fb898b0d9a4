"""Stands in for torchvision, which SGLang imports for models that see: its build here is for another torch.

It has the names that SGLang imports, and nothing behind them.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__version__ = "0.0"


class _Names(type):
    """The kind of a class that has every name, as an enumeration would."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Nothing(ModuleType):
    """A module in which any name is a class without a body."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


for _name in (
    "io",
    "ops",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    sys.modules[f"{__name__}.{_name}"] = _Nothing(f"{__name__}.{_name}")
transforms = sys.modules[f"{__name__}.transforms"]
transforms.functional = sys.modules[f"{__name__}.transforms.functional"]  # type: ignore[attr-defined]
transforms.v2 = sys.modules[f"{__name__}.transforms.v2"]  # type: ignore[attr-defined]
io = sys.modules[f"{__name__}.io"]
ops = sys.modules[f"{__name__}.ops"]

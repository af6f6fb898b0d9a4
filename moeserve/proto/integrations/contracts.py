"""Names of an engine that a plug-in rests on, with the parameters that it knows them by.

A release that renamed one would leave an engine that computes with experts of its own, or fails in the middle
of a forward pass. So each start compares, and stops with the name.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass


class ContractError(ImportError):
    """An engine in which something is not as the plug-in knows it."""


@dataclass(frozen=True)
class Contract:
    """A function or class: where it is, and the names of parameters that must be there, in this order."""

    module: str
    name: str
    parameters: tuple[str, ...]
    more: bool = True  # others may follow


def differences(contracts: Iterable[Contract], properties: Iterable[tuple[str, str, str]] = ()) -> list[str]:
    """What is not as it must be, a sentence each. properties: module, class and name."""
    found = []
    for contract in contracts:
        try:
            thing = importlib.import_module(contract.module)
            for part in contract.name.split("."):
                thing = getattr(thing, part)
        except (ImportError, AttributeError) as failed:
            found.append(f"{contract.module}.{contract.name} is not there: {failed}")
            continue
        names = tuple(inspect.signature(thing).parameters)  # type: ignore[arg-type]
        known = names[: len(contract.parameters)] if contract.more else names
        if known != contract.parameters:
            found.append(
                f"{contract.module}.{contract.name} takes {', '.join(names)}, and not "
                f"{', '.join(contract.parameters)}"
            )
    for module, kind, name in properties:
        try:
            held = inspect.getattr_static(getattr(importlib.import_module(module), kind), name)
        except (ImportError, AttributeError) as failed:
            found.append(f"{module}.{kind}.{name} is not there: {failed}")
            continue
        if not isinstance(held, property):
            found.append(f"{module}.{kind}.{name} is no property")
    return found

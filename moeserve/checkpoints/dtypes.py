"""The dtype of a model's activations and unquantized weights, and which weights are cast to it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from functools import cache

import torch

from moeserve.checkpoints.families.config import Config
from moeserve.checkpoints.layer import StoredLayer
from moeserve.checkpoints.store import DTYPES, CheckpointError, TensorStore
from moeserve.quant.formats.floats import FLOATS

log = logging.getLogger(__name__)

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(config: Config, store: TensorStore) -> torch.dtype:
    """Returns the dtype that the config names, else the one that most bytes of unquantized weights have.

    Raises CheckpointError for another dtype, and where neither config nor weights have one.
    """
    named = next((config[key] for key in ("dtype", "torch_dtype") if config.get(key)), None)
    if named is not None:
        if named not in NAMES:
            raise CheckpointError(f"config.json: dtype must be one of {', '.join(NAMES)}, found {named!r}")
        return NAMES[named]
    nbytes: Counter[torch.dtype] = Counter()
    for entry in store.entries.values():
        dtype = DTYPES.get(entry.dtype)
        if dtype is not None and dtype in FLOATS:
            nbytes[dtype] += entry.nbytes
    if not nbytes:
        raise CheckpointError(
            f"config.json has no key dtype (or torch_dtype), and no tensor is {', '.join(NAMES)}: add the key"
        )
    found = nbytes.most_common(1)[0][0]
    _say(f"{store.directory}: config.json has no key dtype; {found} is taken, as most plain weights have it")
    return found


def say_casts(dtype: torch.dtype, layers: Mapping[int, StoredLayer], store: TensorStore) -> None:
    """Says once which unquantized experts are stored in other dtypes than the model's, and are cast to it."""
    found: Counter[str] = Counter()
    affected = set()
    for index, layer in layers.items():
        if layer.storage.scheme.weights in FLOATS.values():
            weights = (name for name in layer.names.tensors if not name.endswith("bias"))
            codes = (store.entries[name].dtype for name in weights)
            others = [code for code in codes if DTYPES[code] != dtype]
            found.update(others)
            affected |= {index} if others else set()
    if found:
        counted = " and ".join(f"{count} tensors as {code}" for code, count in sorted(found.items()))
        _say(
            f"{store.directory}: {len(affected)} layers store experts in another dtype than the model's "
            f"({counted}); they are cast to {dtype} while they are read"
        )


@cache
def _say(text: str) -> None:
    """Logs a warning, once a process however often a checkpoint is opened."""
    log.warning("%s", text)

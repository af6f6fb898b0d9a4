"""`is_for_good`: whether what a rank was given is wrong, so that it fails alike when it is started again."""

from __future__ import annotations

from moeserve.checkpoints.store import CheckpointError, NotThere
from moeserve.runtime.planning.plan import NoPlan
from moeserve.runtime.sections import ConfigError

GIVEN = (ConfigError, CheckpointError, NoPlan)
"""What is wrong with what a rank was given."""


def is_for_good(error: Exception) -> bool:
    """Whether a rank that cannot start for `error` cannot either when it is started again.

    What the host refuses, such as a port in use or a disk that is not there yet, may be there the next time.
    """
    refused = isinstance(error, NotThere) or isinstance(error.__cause__, OSError)
    return isinstance(error, GIVEN) and not refused

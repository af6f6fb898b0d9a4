"""A caller that was let in is asked anew, also where the grants changed just after it was."""

from pathlib import Path

import pytest

from moeserve.runtime.keys import grants as module
from moeserve.runtime.keys.access import RPCS
from moeserve.runtime.keys.grants import Grants, Refused
from moeserve.runtime.keys.guard import Guard

METHOD = "/moeserve.v1.LaneService/OpenDataConnection"
TOKEN = "a" * 32


def test_grants_that_changed_between_the_check_and_the_offer_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    path = tmp_path / "grants"
    path.write_text(f"call token {TOKEN}\n")
    path.chmod(0o600)
    guard = Guard(Grants(str(path)), lambda token: False, encrypted=True)
    guard.check(METHOD, RPCS[METHOD], TOKEN, (), "127.0.0.1")
    path.write_text(f"call token {'b' * 40}\n")
    still = guard.still(METHOD, RPCS[METHOD], TOKEN, (), "127.0.0.1")
    with pytest.raises(Refused):
        still()

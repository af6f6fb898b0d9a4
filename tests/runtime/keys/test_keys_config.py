"""What an operator may say of keys: nothing is served beyond loopback in the clear by accident."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from houses import house_config

from moeserve.runtime.config import Config
from moeserve.runtime.launch.head_process import reload_root_of
from moeserve.runtime.sections import ConfigError

TLS = {"keys__certificate": "c", "keys__private_key": "k", "keys__ca": "a", "keys__grants": "g"}


def without(*names: str) -> dict[str, Any]:
    return {key: value for key, value in TLS.items() if key.removeprefix("keys__") not in names}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"server__host": "0.0.0.0"}, "nothing is encrypted; .* keys.allow_plaintext = true"),
        ({"server__host": "192.0.2.10"}, "nothing is encrypted"),
        ({"server__host": "::"}, "nothing is encrypted"),
        ({"server__host": "localhost.example"}, "nothing is encrypted"),
        (
            {"server__host": "0.0.0.0", "keys__grants": "g"},
            "tokens of keys.grants would travel as plain text",
        ),
        (
            {"server__host": "0.0.0.0", "keys__grants": "g", "keys__allow_plaintext": True},
            "tokens of keys.grants would travel as plain text",
        ),
        (without("private_key"), "need each other"),
        (without("certificate"), "need each other"),
        (without("ca"), "keys.ca is not set"),
        (without("grants"), "keys.grants is not set"),
        ({"keys__client_ca": "a"}, "which needs keys.certificate"),
        ({"keys__handshake_seconds": 0.0}, "must be positive"),
    ],
)
def test_what_would_be_unsafe_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        house_config(tmp_path, **given).checked()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"server__host": "localhost"},
        {"server__host": "127.0.0.5"},
        {"server__host": "::1"},
        {"keys__grants": "g"},
        {"server__host": "0.0.0.0", "keys__allow_plaintext": True},
        {"server__host": "0.0.0.0", **TLS},
        {"server__host": "0.0.0.0", **TLS, "keys__client_ca": "a"},
    ],
)
def test_what_is_safe_or_said_is_taken(tmp_path: Path, given: dict[str, Any]) -> None:
    assert house_config(tmp_path, **given).checked()


def test_paths_start_at_the_file_s_own_folder(tmp_path: Path) -> None:
    (tmp_path / "service.toml").write_text(
        '[keys]\ngrants = "grants"\nca = "/etc/ca"\nserver_name = "name"\n'
    )
    keys = Config.load(tmp_path / "service.toml").keys
    assert (keys.grants, keys.ca, keys.server_name) == (str(tmp_path / "grants"), "/etc/ca", "name")


def test_reloads_stay_beside_the_served_checkpoint(tmp_path: Path) -> None:
    served = tmp_path / "models" / "one"
    assert reload_root_of(house_config(served)) == str(tmp_path / "models")
    assert reload_root_of(house_config(served, server__reload_root="/srv")) == "/srv"
    assert reload_root_of(house_config(Path("/checkpoint"))) == "/checkpoint"

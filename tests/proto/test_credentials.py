"""What a client trusts and shows: which settings fit, and that files are read again when they change."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from made_certificates import Authority

from moeserve.proto import credentials as room
from moeserve.proto.client import AsyncMoeClient, MoeClient
from moeserve.proto.credentials import Credentials, KeyedChannel, is_loopback
from moeserve.proto.integrations.settings import Settings

TOKEN = "0123456789abcdef"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"certificate": "a"}, "need each other"),
        ({"private_key": "a"}, "need each other"),
        ({"certificate": "a", "private_key": "b"}, "over TLS alone"),
        ({"server_name": "a"}, "give ca too"),
        ({"token": TOKEN, "token_file": "a"}, "not both"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Credentials(**given)


@pytest.mark.parametrize("client", [MoeClient, AsyncMoeClient])
def test_no_token_is_sent_as_plain_text_beyond_loopback(client: Any) -> None:
    with pytest.raises(ValueError, match=r"a token is not sent to 192\.0\.2\.1:1 as plain text") as refused:
        client("192.0.2.1:1", credentials=Credentials(token=TOKEN))
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.8.8.8:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("10.0.0.1:1", False),
        ("0.0.0.0:1", False),
        ("127.0.0.1.example:1", False),
        ("localhost.example:1", False),
    ],
)
def test_what_stays_on_this_machine(address: str, loopback: bool) -> None:
    assert is_loopback(address) == loopback


def test_no_token_is_shown(tmp_path: Path) -> None:
    assert TOKEN not in repr(Credentials(token=TOKEN))
    (tmp_path / "token").write_text(f"{TOKEN} and more")
    with pytest.raises(ValueError, match="must hold one token") as wrong:
        Credentials(token_file=str(tmp_path / "token")).metadata()
    assert TOKEN not in str(wrong.value)


@pytest.mark.parametrize("text", ["", " ", "a b", "a\x00b", "a\nb"])
def test_a_file_without_one_token_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match="must hold one token"):
        MoeClient("127.0.0.1:1", credentials=Credentials(token_file=str(tmp_path / "token")))


def test_files_that_hold_no_keys_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    certificate, _ = authority.sign("one")
    _, other = authority.sign("other")
    (tmp_path / "text").write_text("no keys")
    for given, said in (
        ({"ca": str(tmp_path / "text")}, f"ca: {tmp_path}/text holds no authority's certificate in PEM"),
        (
            {"ca": authority.path, "certificate": certificate, "private_key": other},
            f"certificate: {certificate} and private_key: {other} are no pair in PEM: KEY_VALUES_MISMATCH",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            MoeClient("127.0.0.1:1", credentials=Credentials(**given))
    with pytest.raises(FileNotFoundError):
        MoeClient("127.0.0.1:1", credentials=Credentials(ca=str(tmp_path / "nowhere")))


def test_a_client_that_begins_while_its_token_is_written_reads_it_whole(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("")
    writer = threading.Timer(0.1, token.write_text, (TOKEN,))
    writer.start()
    keyed = KeyedChannel(Credentials(token_file=str(token)), lambda tls: Channel([]))
    assert keyed.now()[1] == (("authorization", f"Bearer {TOKEN}"),)
    writer.join()


class Channel:
    """Notes what is called on it."""

    def __init__(self, made: list[Channel]) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.closed = False
        made.append(self)

    def unary_unary(self, path: str, *given: Any, **options: Any) -> Any:
        return lambda request, **call: self.calls.append((path, call["metadata"]))

    def close(self) -> None:
        self.closed = True


def test_files_are_read_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(Credentials, "grpc_channel", lambda self: Path(self.ca).read_text())
    ca, token = tmp_path / "ca", tmp_path / "token"
    ca.write_text("one")
    token.write_text(TOKEN)
    made: list[Channel] = []
    keyed = KeyedChannel(Credentials(ca=str(ca), token_file=str(token)), lambda tls: Channel(made))
    call = keyed.unary_unary("/x")
    call(b"")
    token.write_text(TOKEN + "0")
    call(b"")
    shown = [metadata for _, metadata in made[0].calls]
    assert shown == [(("authorization", f"Bearer {TOKEN}"),), (("authorization", f"Bearer {TOKEN}0"),)]
    ca.write_text("another")
    call(b"")
    assert [len(one.calls) for one in made] == [2, 1]  # the first is there for what is on it
    ca.unlink()
    call(b"")
    token.write_text("not one token")
    ca.write_text("a third")
    call(b"")
    assert [len(one.calls) for one in made] == [2, 3]
    keyed.close()
    assert all(one.closed for one in made)


def test_a_file_that_cannot_be_used_is_an_error_in_the_log_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.0)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    keyed = KeyedChannel(Credentials(token_file=str(token)), lambda tls: Channel([]))
    for wrong in (f"{TOKEN} and more", None):
        token.unlink() if wrong is None else token.write_text(wrong)
        for _ in range(3):
            keyed.unary_unary("/x")(b"")
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert f"before stays: {token} must hold one token" in caplog.text and TOKEN not in caplog.text


def test_files_are_not_looked_at_for_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    looks = [0]
    stamps = Credentials.stamps

    def counted(self: Credentials) -> Any:
        looks[0] += 1
        return stamps(self)

    monkeypatch.setattr(Credentials, "stamps", counted)
    keyed = KeyedChannel(Credentials(token_file=str(token)), lambda tls: Channel([]))
    until, calls = time.monotonic() + 0.3, 0
    while time.monotonic() < until:
        keyed.now()
        calls += 1
    assert looks[0] <= 4 < calls


def test_a_file_says_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "credentials.toml"
    file.write_text('ca = "ca.crt"\ntoken_file = "/run/token"\nserver_name = "moeserve"\n')
    made = Credentials(ca=str(tmp_path / "ca.crt"), token_file="/run/token", server_name="moeserve")
    assert Credentials.load(str(file)) == made
    chosen = {"MOESERVE_EXPERTS": "127.0.0.1:1", "MOESERVE_EXPERTS_CREDENTIALS": str(file)}
    settings = Settings.chosen(chosen)
    assert settings is not None and settings.credentials == made
    file.write_text(f'token = "{TOKEN}"\n')
    with pytest.raises(ValueError, match=r"_CREDENTIALS: .*'token' is not one of ca") as wrong:
        Settings.chosen(chosen)
    assert TOKEN not in str(wrong.value)
    file.unlink()
    with pytest.raises(ValueError, match="cannot read"):
        Settings.chosen(chosen)

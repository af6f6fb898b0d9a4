"""The file of grants: what it may say, when it is read again, and that it is told to nobody."""

from __future__ import annotations

import hmac
import logging
import os
import time
from pathlib import Path

import pytest
from made_certificates import replaced

from moeserve.runtime.keys import grants as grants_room
from moeserve.runtime.keys import guard as guard_room
from moeserve.runtime.keys.access import OPEN, Role
from moeserve.runtime.keys.grants import BadGrants, Grants, NotAuthenticated, WrongRole
from moeserve.runtime.keys.guard import Guard, host_of, token_in

OLD, NEW = "0123456789abcdef-old", "0123456789abcdef-new"
CALL, OBSERVE = frozenset({Role.CALL}), frozenset({Role.OBSERVE})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "grants"
    replaced(path, f"call token {OLD}  # the model server\n\nobserve,operate name ops.example\n".encode())
    return path


def guard_of(file: Path, *, encrypted: bool = True) -> Guard:
    return Guard(Grants(str(file)), lambda token: token == "member", encrypted=encrypted)


def read_again(grants: Grants) -> None:
    grants._looked = 0.0


def test_tokens_and_names_have_the_roles_of_their_lines(file: Path) -> None:
    grants = Grants(str(file))
    assert grants.of_token(OLD) == CALL
    assert grants.of_names(["other", "ops.example"]) == {Role.OBSERVE, Role.OPERATE}
    assert grants.of_names(["OPS.example", "ops.example.org"]) == frozenset()
    assert grants.of_anyone() == frozenset()
    for token in ("", OLD[:-1], OLD + "x", "ops.example"):
        with pytest.raises(NotAuthenticated):
            grants.of_token(token)


def test_old_and_new_are_valid_during_a_rotation(file: Path) -> None:
    grants = Grants(str(file))
    replaced(file, f"call token {OLD}\ncall token {NEW}\n".encode())
    read_again(grants)
    assert grants.of_token(OLD) == grants.of_token(NEW) == CALL
    replaced(file, f"call token {NEW}\n".encode())
    read_again(grants)
    assert grants.of_token(NEW) == CALL
    with pytest.raises(NotAuthenticated):
        grants.of_token(OLD)


def test_it_is_looked_at_again_by_itself(file: Path) -> None:
    grants = Grants(str(file))
    grants.of_token(OLD)
    replaced(file, f"call token {NEW}\n".encode())
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            assert grants.of_token(NEW) == CALL
            return
        except NotAuthenticated:
            time.sleep(0.01)
    raise AssertionError("the file was not read again")


@pytest.mark.parametrize("text", [b"call tokn x", b"\xff\xfe", None])
def test_a_file_that_cannot_be_read_leaves_what_was(
    file: Path, text: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    grants = Grants(str(file))
    if text is None:
        file.unlink()
    else:
        replaced(file, text)
    for _ in range(3):
        read_again(grants)
        assert grants.of_token(OLD) == CALL
    (said,) = caplog.records
    assert said.levelname == "ERROR" and str(file) in said.getMessage(), "once, naming the file"
    assert "what was granted before stays" in said.getMessage()
    caplog.clear()
    replaced(file, f"call token {NEW}\n".encode())
    read_again(grants)
    assert grants.of_token(NEW) == CALL
    replaced(file, b"call tokn x")
    read_again(grants)
    assert grants.of_token(NEW) == CALL
    assert "what was granted before stays" in caplog.text, "it is said anew after one that can be used"


@pytest.mark.parametrize("text", [b"", b"\n  \n# call token none\n"], ids=["emptied", "comments"])
def test_who_empties_the_file_locks_all_callers_out(
    file: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokens that stayed valid would let in whom the operator means to lock out."""
    grants = Grants(str(file))
    assert grants.of_token(OLD) == CALL and not caplog.records
    file.write_bytes(text)
    for _ in range(3):
        read_again(grants)
        with pytest.raises(NotAuthenticated):
            grants.of_token(OLD)
        assert not grants.of_names(["ops.example"]) and not grants.of_anyone()
    (said,) = caplog.records
    assert said.levelname == "ERROR"
    assert f"{file} grants nothing to anybody: all callers are refused" in said.getMessage()
    replaced(file, f"call token {NEW}\n".encode())
    read_again(grants)
    assert grants.of_token(NEW) == CALL


def test_a_file_that_grants_nothing_is_named_at_the_start(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_bytes(b"")
    Grants(str(file))
    assert f"{file} grants nothing to anybody" in caplog.text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("token {secret}", "role 1 of the first word is unknown"),
        ("{secret}", "role 1 of the first word is unknown"),
        ("call,{secret} anyone", "role 2 of the first word is unknown"),
        ("call {secret}", "is neither `ROLES token TOKEN`"),
        ("call token", "is neither"),
        ("call token {secret} more", "is neither"),
        ("member token {secret}", "role 1 of the first word is unknown; there are call, observe, operate"),
        ("call token short", "a token has 16 to 4096 characters, and this one 5"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_not_repeated(tmp_path: Path, line: str, said: str) -> None:
    secret = "s3cr3t-s3cr3t-s3cr3t"
    path = tmp_path / "grants"
    path.write_text(f"# tokens\n{line.format(secret=secret)}\n")
    with pytest.raises(BadGrants) as bad:
        Grants(str(path))
    assert said in str(bad.value) and "line 2" in str(bad.value) and secret not in str(bad.value)


def test_tokens_are_compared_in_constant_time_and_all_of_them(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced(file, "".join(f"call token {number:032d}\n" for number in range(5)).encode())
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return hmac.compare_digest(one, other)

    class Watched:
        compare_digest = staticmethod(compare)

    grants = Grants(str(file))
    monkeypatch.setattr(grants_room, "hmac", Watched)
    assert grants.of_token(f"{0:032d}") == CALL
    assert len(compared) == 5 and {len(part) for pair in compared for part in pair} == {32}


def test_no_token_is_kept_or_shown(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    grants = Grants(str(file))
    read_again(grants)
    grants.of_token(OLD)
    assert OLD not in repr(vars(grants)) + repr(vars(grants._granted)) + caplog.text


def test_a_file_that_others_can_read_is_warned_of(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    Grants(str(file))
    assert "can be read by other users" not in caplog.text
    os.chmod(file, 0o644)
    Grants(str(file))
    assert "can be read by other users" in caplog.text


def test_anyone_has_what_the_file_says(file: Path) -> None:
    replaced(file, b"observe anyone\n")
    guard = guard_of(file)
    guard.check("status", OBSERVE, None, (), "192.0.2.1")
    with pytest.raises(NotAuthenticated):
        guard.check("forward", CALL, None, (), "192.0.2.1")


@pytest.mark.parametrize(
    ("bearer", "names", "needed", "raised"),
    [
        (OLD, (), CALL, None),
        (None, ("ops.example",), OBSERVE, None),
        (OLD, ("ops.example",), OBSERVE, None),
        ("member", (), frozenset({Role.MEMBER}), None),
        (None, (), OPEN, None),
        (None, (), CALL, NotAuthenticated),
        ("x" * 20, (), CALL, NotAuthenticated),
        ("x" * 20, ("ops.example",), OBSERVE, NotAuthenticated),  # what is shown has to be valid, all of it
        ("", (), CALL, NotAuthenticated),
        (OLD, (), OBSERVE, WrongRole),
        (OLD, (), frozenset({Role.MEMBER}), WrongRole),
        (OLD, (), None, WrongRole),
        (None, (), None, NotAuthenticated),
        (None, ("stranger",), CALL, WrongRole),
        ("member", (), CALL, WrongRole),
    ],
)
def test_who_may_do_what(
    file: Path,
    bearer: str | None,
    names: tuple[str, ...],
    needed: frozenset[Role] | None,
    raised: type[Exception] | None,
) -> None:
    guard = guard_of(file)
    if raised is None:
        guard.check("it", needed, bearer, names, "192.0.2.1")
        return
    with pytest.raises(raised) as refused:
        guard.check("it", needed, bearer, names, "192.0.2.1")
    assert not bearer or bearer not in str(refused.value)


@pytest.mark.parametrize("peer", ["192.0.2.1", "::ffff:192.0.2.1", "fe80::1", "host.example", ""])
def test_a_token_is_not_taken_as_plain_text_from_beyond_loopback(file: Path, peer: str) -> None:
    guard = guard_of(file, encrypted=False)
    for token in (OLD, "member"):
        with pytest.raises(NotAuthenticated, match="plain text"):
            guard.check("it", CALL, token, (), peer)
    guard.check("it", CALL, OLD, (), "127.0.0.1")
    guard.check("it", CALL, OLD, (), "[::1]")


def test_refusals_are_one_line_of_the_log_however_many_there_are(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = guard_of(file)
    for _ in range(1000):
        with pytest.raises(NotAuthenticated):
            guard.check("it", CALL, None, (), "192.0.2.1")
    assert len(caplog.records) == 1 and "refused it to 192.0.2.1" in caplog.text


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("", None),
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", ""),
        ("abc", ""),
        ("Bearer", ""),
    ],
)
def test_the_token_of_a_header(header: str, token: str | None) -> None:
    assert token_in(header) == token


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:127.0.0.1:5000", "127.0.0.1"),
        ("ipv6:%5B::1%5D:5000", "[::1]"),
        ("unix:/tmp/x", "localhost"),
        ("unix:", "localhost"),
        ("ipv4:192.0.2.1:1", "192.0.2.1"),
    ],
)
def test_the_host_of_a_peer(peer: str, host: str) -> None:
    assert host_of(peer) == host


def test_who_was_let_in_is_asked_again_once_anything_is_another(file: Path) -> None:
    """A guard remembers whom it let in: for the same token alone, and until something else is granted."""
    guard = guard_of(file, encrypted=False)

    def ask(
        token: str | None, what: str = "Forward", peer: str = "localhost", needed: Role = Role.CALL
    ) -> None:
        guard.check(what, frozenset({needed}), token, (), peer)

    for _ in range(3):
        ask(OLD)
    for token in ("", OLD + "x", OLD[:-1], NEW, "\ud800"):
        with pytest.raises(NotAuthenticated):
            ask(token)
    with pytest.raises(NotAuthenticated):
        ask(None)
    with pytest.raises(WrongRole):
        ask(OLD, "Reload", needed=Role.OPERATE)
    with pytest.raises(NotAuthenticated):
        ask(OLD, peer="10.0.0.7")
    ask(OLD)
    replaced(file, f"call token {NEW}\n".encode())
    read_again(guard.grants)
    with pytest.raises(NotAuthenticated):
        ask(OLD)
    ask(NEW)


def test_what_a_guard_remembers_is_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_room, "MOST_REMEMBERED", 8)
    guard = guard_of(file)
    for at in range(100):
        guard.check("Forward", CALL, OLD, (), f"10.0.0.{at}")
    assert 0 < len(guard._let_in) <= 8

"""The store in which a generation's process groups meet: what torch's own stores do, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest

from moeserve.runtime.head.generations.key_store import ENTRY_BYTES, KeyStore


class Calls:
    """Members' calls of a store, numbered as a member numbers them."""

    def __init__(self, limit: int = 1 << 20) -> None:
        self.store, self.made = KeyStore(limit), 0

    def ask(self, what: str, *keys: str, seat: int = 0, **more: Any) -> list[tuple[int, dict[str, Any]]]:
        self.made += 1
        asked = {"kind": "store", "call": self.made, "what": what, "keys": list(keys)}
        return self.store.answers(seat, asked | more)

    def value(self, what: str, *keys: str, **more: Any) -> Any:
        """What is answered at once, to the one that asked."""
        ((seat, answer),) = self.ask(what, *keys, **more)
        assert (seat, answer["call"]) == (0, self.made)
        return answer["value"]


def test_who_waits_is_answered_when_the_last_key_has_come() -> None:
    calls = Calls()
    assert calls.ask("get", "a", "b", seat=3) == []
    assert calls.ask("wait", "b", seat=4) == []
    assert calls.ask("set", "a", values=[b"1"]) == [(0, {"call": 3, "value": None})]
    assert calls.ask("set", "b", values=[b"2"]) == [
        (0, {"call": 4, "value": None}),
        (3, {"call": 1, "value": [b"1", b"2"]}),
        (4, {"call": 2, "value": None}),
    ]
    assert calls.ask("set", "b", values=[b"3"]) == [(0, {"call": 5, "value": None})]  # nobody waits any more


def test_a_key_that_is_deleted_is_waited_for_again() -> None:
    calls = Calls()
    assert calls.ask("get", "a", "b", seat=3) == []
    calls.value("set", "a", values=[b"1"])
    assert calls.value("delete", "a") and not calls.value("delete", "a")
    assert len(calls.ask("set", "b", values=[b"2"])) == 1
    assert calls.ask("add", "a", amount=5)[1:] == [(3, {"call": 1, "value": [b"5", b"2"]})]


def test_memory_is_bounded_and_given_back() -> None:
    calls = Calls(limit=1000)
    calls.value("set", "k", values=[b"x" * 500])
    ((_, answer),) = calls.ask("set", "more", values=[b"x" * 500])
    assert answer["error"] == f"the store of a generation holds {ENTRY_BYTES + 501} of 1000 bytes"
    ((_, answer),) = calls.ask("append", "k", values=[b"x" * 500])
    assert "error" in answer
    ((_, answer),) = calls.ask("get", *(f"absent {at}" for at in range(10)))  # nor do waits
    assert "error" in answer
    calls.value("set", "k", values=[b"y" * 600])  # in the place of the 500
    calls.value("delete", "k")
    assert calls.store.nbytes == 0
    assert calls.ask("get", "a", "b") == [] and calls.store.nbytes > 0
    assert calls.store.answers(0, {"call": calls.made, "what": "forget", "keys": []}) == []
    assert calls.store.nbytes == 0


def test_a_comparison_that_wrote_nothing_is_no_key_that_has_come() -> None:
    calls = Calls()
    assert calls.ask("get", "a", "b", seat=3) == []
    assert calls.value("compare_set", "a", values=[b"other", b"new"]) == b"other"
    assert calls.ask("set", "b", values=[b"2"]) == [(0, {"call": 3, "value": None})]  # `a` is still missing
    assert calls.ask("compare_set", "a", values=[b"", b"1"])[1:] == [(3, {"call": 1, "value": [b"1", b"2"]})]


def test_keys_that_are_set_together_are_set_all_or_not_at_all() -> None:
    calls = Calls(limit=1000)
    assert calls.ask("wait", "a", seat=3) == []
    before = calls.store.nbytes
    ((seat, answer),) = calls.ask("set", "a", "b", values=[b"1", b"x" * 1000])
    assert (seat, "error" in answer) == (0, True)
    with pytest.raises(TypeError):
        calls.ask("set", "a", "b", values=[b"1", "a text"])
    with pytest.raises(ValueError, match="zip"):
        calls.ask("set", "a", "b", values=[b"1"])
    assert calls.value("count") == 0 and not calls.value("check", "a")
    assert calls.store.nbytes == before
    assert calls.ask("set", "a", "b", values=[b"1", b"2"])[1:] == [(3, {"call": 1, "value": None})]
    calls.value("set", "a", "b", "a", values=[b"3" * 400, b"4", b"5"])  # a key's last value counts
    assert calls.value("get", "a", "b") == [b"5", b"4"]
    assert calls.value("delete", "a") and calls.value("delete", "b")
    assert calls.store.nbytes == 0


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("open", {}),
        ("set", {"values": []}),
        ("set", {"values": [7]}),
        ("set", {}),
        ("add", {"amount": "much"}),
        ("append", {"values": [b"a", b"b"]}),
        ("set", {"values": ["a text"]}),
    ],
)
def test_what_is_no_call_is_refused(what: str, more: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Calls().ask(what, "k", **more)


def test_a_key_is_a_text() -> None:
    with pytest.raises(TypeError, match="takes str here, not int"):
        KeyStore().answers(0, {"call": 1, "what": "check", "keys": [7]})

"""A member's store over its stream: it does what torch's own do, and a group forms over it; waits end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel import parallel_launch
from store_ranks import Head, formed_over_streams, member_of

from moeserve.runtime.control.store import StreamStore

WITHIN = 5.0


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.close()


DOINGS: dict[str, Callable[[Any], object]] = {
    "set": lambda store: (store.set("k", "v"), store.get("k")),
    "bytes": lambda store: (store.set("k", bytes(range(256))), store.get("k")),
    "empty": lambda store: (store.set("k", ""), store.get("k")),
    "add": lambda store: (store.add("n", 2), store.add("n", 40), store.get("n")),
    "add zero": lambda store: (store.add("n", 0), store.check(["n"])),
    "check": lambda store: (store.set("k", "v"), store.check(["k"]), store.check(["k", "other"])),
    "delete": lambda store: (store.set("k", "v"), store.delete_key("k"), store.delete_key("k")),
    "wait": lambda store: (store.set("k", "v"), store.wait(["k"]), store.wait(["k"], timedelta(seconds=1))),
    "append": lambda store: (store.append("k", "a"), store.append("k", "b"), store.get("k")),
    "several": lambda store: (store.multi_set(["a", "b"], ["1", "2"]), store.multi_get(["b", "a"])),
    "swap of none": lambda store: (store.compare_set("k", "", "new"), store.get("k")),
    "swap": lambda store: (store.set("k", "v"), store.compare_set("k", "v", "w"), store.get("k")),
    "no swap": lambda store: (store.set("k", "v"), store.compare_set("k", "x", "w"), store.get("k")),
    "no swap of none": lambda store: (store.compare_set("k", "x", "w"), store.check(["k"])),
    "extended": lambda store: store.has_extended_api(),
}


@pytest.mark.parametrize("doing", DOINGS)
@pytest.mark.parametrize("prefixed", [False, True], ids=["straight", "by torch"])
def test_a_store_does_what_torchs_does(head: Head, doing: str, prefixed: bool) -> None:
    own, torchs = member_of(head, 0), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [dist.PrefixStore("x", store) if prefixed else store for store in (own, torchs)]
    found, expected = (DOINGS[doing](store) for store in stores)
    assert found == expected


def test_a_wait_ends_when_the_key_comes_and_other_threads_go_on(head: Head) -> None:
    one, other = member_of(head, 0), member_of(head, 1)
    came: list[bytes] = []
    waiting = threading.Thread(target=lambda: came.append(dist.PrefixStore("x", one).get("k")), daemon=True)
    waiting.start()
    assert one.add("n", 1) == 1  # of the same store, meanwhile
    other.set("x/k", "v")
    waiting.join(WITHIN)
    assert came == [b"v"]


@pytest.mark.parametrize(
    "ask", [lambda store: store.get("k"), lambda store: store.wait(["k"])], ids=["get", "wait"]
)
def test_a_wait_is_bounded_and_forgotten(head: Head, ask: Callable[[Any], object]) -> None:
    store = member_of(head, 0)
    through = dist.PrefixStore("x", store)
    through.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(RuntimeError, match=r"of 'x/k': timed out after 0\.2 s"):
        ask(through)
    assert store.num_keys() == 0  # the head has taken what was said before
    assert head.keys.nbytes == 0


def test_closing_ends_waits_at_once_and_for_ever(head: Head) -> None:
    store = member_of(head, 0)
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(dist.DistStoreError) as ended:
            dist.PrefixStore("x", store).get("k")
        said.append(str(ended.value))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    while not store._asked:
        time.sleep(0.01)
    store.close("the generation was aborted")
    waiting.join(WITHIN)
    assert said == ["get of 'x/k': the generation was aborted"]
    with pytest.raises(RuntimeError, match="set of 'a': the generation was aborted"):
        store.set("a", "b")


def test_an_answer_of_another_generation_is_none(head: Head) -> None:
    store = StreamStore(lambda message: None, 7, 0.2)
    threading.Timer(0.05, lambda: store.answered({"generation": 6, "call": 1, "value": ["v"]})).start()
    with pytest.raises(RuntimeError, match="timed out"):
        store.get("k")


def test_a_full_store_refuses_and_says_so() -> None:
    head = Head(limit=300)
    with pytest.raises(RuntimeError, match=r"set of 'k': the store of a generation holds 0 of 300 bytes"):
        member_of(head, 0).set("k", "x" * 300)
    head.close()


def test_a_group_forms_works_and_ends_over_streams_beside_the_next_one() -> None:
    head = Head()
    try:
        assert parallel_launch(3, formed_over_streams, head.address) == [True] * 3
    finally:
        head.close()
    assert torch.distributed.is_initialized() is False


@pytest.mark.gpu(2)
def test_a_group_of_nccl_forms_works_and_ends_over_streams() -> None:
    head = Head()
    try:
        found = parallel_launch(2, formed_over_streams, head.address, "cuda", timeout=200, device="cuda")
        assert found == [True] * 2
    finally:
        head.close()

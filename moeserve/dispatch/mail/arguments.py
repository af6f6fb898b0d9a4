"""What the kernels of a device lane of a GPU are given, as the structs of their text have it."""

from __future__ import annotations

from moeserve.device.arguments import Arguments

ROWS = {
    "lines_at": "u64",
    "hidden_at": "u64",
    "route_at": "u64",
    "weights_at": "u64",
    "stage": "int",
    "layer": "int",
    "kind": "int",
    "row_words": "int",
    "route_words": "int",
}
"""Where the rows of a stage's step lie in the mailbox, and what they are."""

BROUGHT = {
    "table": "u64*",
    "hidden": "const uint4*",
    "route": "const u32*",
    "weights": "const u32*?",
    "header_at": "u64",
    "count": "int",
    **ROWS,
}
"""The rows that a caller brings."""

BRING = Arguments("BringArguments", **BROUGHT)
FETCH = Arguments(
    "FetchArguments",
    table="u64*",
    out="uint4*",
    lines_at="u64",
    rows_at="u64",
    stage="int",
    count="int",
    row_words="int",
    lines="int",
    awaited="int",
)
EXCHANGE = Arguments(
    "ExchangeArguments",
    **BROUGHT,
    bringing="int",
    out="uint4*",
    answer_lines_at="u64",
    answer_at="u64",
    answer_stage="int",
    answer_count="int",
    lines="int",
)
TAKE = Arguments(
    "TakeArguments",
    state="u64*",
    hidden="uint4*",
    route="u32*",
    weights="u32*?",
    valid="u8*",
    padded="int",
    most="int",
    experts="int",
    blocks="int",
    awaited="int",
    early="int",
    host="int",
    buffers="int",
    **ROWS,
)
POST = Arguments(
    "PostArguments",
    state="u64*",
    answer="const uint4*",
    living="const int*?",
    places="u64",
    counts="const int*?",
    totals="u64*?",
    taken="u64*?",
    slots="int",
    took="int",
    early="int",
    last="int",
    lines_at="u64",
    rows_at="u64",
    buffer_bytes="u64",
    stage="int",
    row_words="int",
    blocks="int",
    host="int",
)
AWAIT = Arguments(
    "AwaitArguments",
    words="u64*",
    lines_at="u64",
    late="u64",
    box="int",
    stage="int",
    row_words="int",
    blocks="int",
    early="int",
    host="int",
)
COPY = Arguments(
    "WordsArguments", **{"from": "const u64*", "to": "u64*", "host": "u64", "least": "u64", "again": "int"}
)

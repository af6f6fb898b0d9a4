"""The committed stubs are those of moe.proto."""

from moeserve.proto import generate


def test_the_committed_stubs_are_what_the_compiler_makes(tmp_path):
    for made in generate.generate(tmp_path):
        committed = generate.ROOM / made.name
        assert made.read_bytes() == committed.read_bytes(), f"{made.name} is stale: run `make proto`"


def test_stubs_import_each_other_by_their_place_in_the_package():
    text = (generate.ROOM / "moe_pb2_grpc.py").read_text()
    assert "from moeserve.proto import moe_pb2" in text

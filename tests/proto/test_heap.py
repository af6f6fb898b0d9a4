"""Large blocks are kept by malloc once it was told so."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from moeserve.proto.heap import keep_freed_memory
if sys.argv[1] == 'kept':
    assert keep_freed_memory()
for _ in range(3):
    bytearray(40 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    bytearray(40 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_a_block_that_was_freed_costs_no_page_faults_again():
    faults = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", FAULTS, how], check=True, capture_output=True, timeout=60
            ).stdout
        )
        for how in ("kept", "plain")
    }
    assert faults["kept"] < 100 < faults["plain"]

"""`WARM`: how tests start processes that would otherwise spend their first seconds importing torch."""

from __future__ import annotations

import multiprocessing

WARM = multiprocessing.get_context("forkserver")
"""Its processes come from one that has imported everything and done nothing: it has no thread, socket or
process group to inherit, and its environment is that of the first use."""

WARM.set_forkserver_preload(["moeserve.runtime.launch.rank_process"])

"""Makes vLLM's configuration with one option after the other, as its start does, and writes what each was
refused with, None where it was not: `python vllm_configure.py JOB.json ANSWER.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def refused(model: str, options: dict[str, Any]) -> str | None:
    """What vLLM raises for a configuration of `options`."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        EngineArgs(model, skip_tokenizer_init=True, max_model_len=256, **options).create_engine_config()
    except Exception as failed:
        return str(failed)
    return None


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    answer = {name: refused(job["model"], options) for name, options in job["configurations"].items()}
    Path(sys.argv[2]).write_text(json.dumps(answer))

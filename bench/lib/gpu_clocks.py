"""`GpuClocks`: at which clock and power a GPU runs while something is measured on it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Sequence

import numpy as np
import torch

from bench.lib.children import end

EVERY_MS = 50
END_SECONDS = 5.0
ASKED = ("clocks.sm", "power.draw")  # MHz, W


def command(uuid: str, every_ms: int = EVERY_MS) -> list[str]:
    """What writes both, line by line, for the GPU of this UUID."""
    named = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    form = "--format=csv,noheader,nounits"
    return ["nvidia-smi", f"--id={named}", f"--query-gpu={','.join(ASKED)}", form, f"--loop-ms={every_ms}"]


class GpuClocks:
    """A context. Afterwards `told` says what was read meanwhile; nothing where nvidia-smi gives nothing."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._read, name="gpu-clocks", daemon=True)
        self._read_values = list[tuple[float, ...]]()
        self.why_not = ""  # nothing is read

    @classmethod
    def of(cls, device: str) -> GpuClocks:
        """Of a device of torch, which may be one of few that this process sees."""
        return cls(command(str(torch.cuda.get_device_properties(device).uuid)))

    def __enter__(self) -> GpuClocks:
        try:
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except OSError as error:
            self.why_not = str(error)
            return self
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        if self._process is None:
            return
        end(self._process, END_SECONDS)
        self._thread.join(END_SECONDS)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    values = tuple(float(value) for value in line.split(","))
                except ValueError:  # "[N/A]", or why it gives nothing
                    self.why_not = line.strip()
                    continue
                if len(values) == len(ASKED):
                    self._read_values.append(values)

    @property
    def told(self) -> dict[str, float]:
        """The median and lowest clock in MHz, and the median power in W."""
        if not self._read_values:
            return {}
        clocks, power = (np.array(column) for column in zip(*self._read_values, strict=True))
        return {
            "SM MHz": float(np.median(clocks)),
            "lowest SM MHz": float(clocks.min()),
            "W": float(np.median(power)),
        }

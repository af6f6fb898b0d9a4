"""The kernels that group and weigh rows agree with torch, on a GPU and under Triton's interpreter."""

from importlib.util import find_spec

import interpreted
import pytest
import torch


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_under_the_interpreter() -> None:
    interpreted.run("permute_cases")


@pytest.mark.gpu(1)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    import permute_cases

    permute_cases.check_all("cuda")

"""What fakes of kernel libraries compute with: packed bytes read by index, and experts by their definition.

Nothing here comes from `moeserve`'s layouts or kernels: a fake that used them could not see a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4(codes: Tensor) -> Tensor:
    """Bytes `[..., K / 2]` of two codes, low nibble first, as float32 `[..., K]`."""
    bytes_ = codes.view(torch.uint8).long()
    return E2M1[torch.stack((bytes_ & 15, bytes_ >> 4), dim=-1).flatten(-2)]


def e8m0(exponents: Tensor) -> Tensor:
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def spread(scale: Tensor, columns: int, rows: int = 1) -> Tensor:
    """A scale of blocks for each element."""
    return scale.repeat_interleave(rows, dim=-2).repeat_interleave(columns, dim=-1)


def unswizzled(scale: Tensor, rows: int, groups: int) -> Tensor:
    """Bytes in 128 x 4 tiles, `[e, ...]`, by row and group: uint8 `[e, rows, groups]`."""
    m, k, wide = torch.arange(rows)[:, None], torch.arange(groups)[None, :], -(-groups // 4)
    offset = (m // 128 * wide + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    return scale.reshape(scale.shape[0], -1).view(torch.uint8)[:, offset]


def unshuffled(rows: Tensor, block: int) -> Tensor:
    """Rows `[e, n, ...]` back where they were: row i of a block was put at (i % (b / 8)) 8 + i // (b / 8)."""
    n = torch.arange(rows.shape[1])
    i, few = n % block, block // 8
    return rows[:, n - i + i % few * 8 + i // few]


def unblocked(codes: Tensor) -> Tensor:
    """`[e, K / b, N, b]` as `[e, N, K]`."""
    return codes.transpose(1, 2).flatten(2)


def gate_first(up_first: Tensor) -> Tensor:
    """Rows `[e, 2I, ...]` with the halves exchanged."""
    up, gate = up_first.chunk(2, dim=1)
    return torch.cat((gate, up), dim=1)


def from_turns(rows: Tensor) -> Tensor:
    """Rows u0, g0, u1, g1, ... as all gates, then all ups."""
    return torch.cat((rows[:, 1::2], rows[:, 0::2]), dim=1)


def from_sixty_fours(rows: Tensor) -> Tensor:
    """64 rows of up, 64 of gate, and so on, as all gates, then all ups."""
    split = rows.unflatten(1, (-1, 2, 64))
    return torch.cat((split[:, :, 1].flatten(1, 2), split[:, :, 0].flatten(1, 2)), dim=1)


def swiglu(rows: Tensor, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None) -> Tensor:
    gate, up = rows.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def activated(name: str, rows: Tensor, parameters: tuple[float, float, float | None] | None = None) -> Tensor:
    """An activation under the name that libraries give it."""
    if name == "Swiglu":
        return swiglu(rows, *(parameters or ()))
    assert parameters is None, f"{name} takes no parameters"
    if name == "Relu2":
        return F.relu(rows).square()
    gate, up = rows.chunk(2, dim=-1)
    return {
        "Silu": F.silu,
        "Gelu": F.gelu,
        "GegluTanh": lambda x: F.gelu(x, approximate="tanh"),
    }[name](gate) * up


def parameters_of(
    slot: int, alpha: Tensor | None, beta: Tensor | None, limit: Tensor | None
) -> tuple[float, float, float | None] | None:
    """One slot's SwiGLU parameters, or None where none were given."""
    if alpha is None and beta is None and limit is None:
        return None
    assert alpha is not None and beta is not None
    return float(alpha[slot]), float(beta[slot]), None if limit is None else float(limit[slot])


def routed(
    rows: Tensor, ids: Tensor, slots: int, expert: Callable[[int, Tensor], Tensor], width: int
) -> Tensor:
    """`expert(slot, rows)` of each row whose id is a slot here; zeros for others."""
    out = torch.zeros(rows.shape[0], width)
    for slot in range(slots):
        own = ids.flatten() == slot
        if own.any():
            out[own] = expert(slot, rows[own])
    return out

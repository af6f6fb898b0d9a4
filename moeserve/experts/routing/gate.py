"""The gate of a layer as a value: `Gate` turns router logits into chosen experts and weights."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from moeserve.device.machine import kernels_serve
from moeserve.experts.routing.methods import (
    RENORMALIZE_EPSILON,
    ROUTINGS,
    SCORES,
    RoutingMethod,
    choose_by_score,
)

MOST_EXPERTS = 1024
"""Most experts of a layer that the GPU kernel serves: a program keeps their scores in registers."""


@dataclass(frozen=True, eq=False)
class Gate:
    """How one layer routes: a method of `ROUTINGS` with this layer's numbers.

    `scoring`, `renormalize` and `biased` are filled in from the method where it fixes them, and must be given
    where it does not (Unspecified, DeepSeekV2). ValueError names the setting that the method cannot have.
    """

    method: str
    experts: int  # E
    top_k: int  # K
    groups: int = 1  # equal runs of neighbouring experts; 1: no groups
    topk_groups: int = 1  # groups a token may choose from
    scaling: float = 1.0  # of the weights, after renormalizing
    scoring: str | None = None  # a key of SCORES
    renormalize: bool | None = None  # weights of a token sum to `scaling`
    biased: bool | None = None  # a correction bias takes part in choosing; see with_bias
    bias: Tensor | None = None  # [E] float32
    logits_dtype_weights: bool = False  # weights are rounded to the dtype of the logits
    logits_dtype_scores: bool = False  # scores and weights are computed in the dtype of the logits
    by_token: bool = False  # a table chooses by token id (DeepSeek-V4's first layers): `weigh`, never `route`
    weight_on_input: bool = False  # the weight multiplies the expert's input, and its output counts with 1
    epsilon: float = RENORMALIZE_EPSILON  # added to the sum that weights are divided by
    by_model: str = (
        ""  # why logits alone do not tell the choice: the model's router chooses, and says ids and weights
    )

    def __post_init__(self) -> None:
        if self.method not in ROUTINGS:
            raise ValueError(f"unknown routing method {self.method!r}; known: {', '.join(sorted(ROUTINGS))}")
        entry = ROUTINGS[self.method]
        for setting in ("scoring", "renormalize", "biased"):
            object.__setattr__(self, setting, self._resolved(setting, entry))
        if self.scoring not in SCORES:
            raise ValueError(
                f"unsupported scoring function {self.scoring!r}; known: {', '.join(sorted(SCORES))}"
            )
        self._check_counts(entry)
        self._check_groups(entry)
        self._check_bias()
        if self.scaling != 1.0 and not entry.scaled:
            raise ValueError(f"routing {self.method} does not scale its weights, got scaling={self.scaling}")
        if self.weight_on_input and self.top_k != 1:
            raise ValueError(f"a weight on the input needs top_k=1, got top_k={self.top_k}")

    def _resolved(self, setting: str, entry: RoutingMethod) -> str | bool | None:
        given: str | bool | None = getattr(self, setting)
        fixed: str | bool | None = getattr(entry, setting)
        if fixed is None and given is None:
            raise ValueError(f"routing {self.method} needs {setting} to be given")
        if fixed is not None and given is not None and given != fixed:
            raise ValueError(f"routing {self.method} has {setting}={fixed}, got {setting}={given}")
        return given if fixed is None else fixed

    def _check_counts(self, entry: RoutingMethod) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ValueError(f"top_k={self.top_k} must be between 1 and experts={self.experts}")
        if entry.largest_top_k is not None and self.top_k > entry.largest_top_k:
            raise ValueError(
                f"routing {self.method} needs top_k={entry.largest_top_k}, got top_k={self.top_k}"
            )

    def _check_groups(self, entry: RoutingMethod) -> None:
        groups, kept = self.groups, self.topk_groups
        if not 1 <= kept <= groups:
            raise ValueError(f"topk_groups={kept} must be between 1 and groups={groups}")
        if groups == 1:
            return
        if not entry.grouped:
            raise ValueError(f"routing {self.method} has no groups, got groups={groups}")
        if self.experts <= groups or self.experts % groups:
            raise ValueError(
                f"experts={self.experts} must be a multiple of groups={groups}, two or more in each"
            )
        if self.top_k > kept * self.experts // groups:
            reach = f"{kept} groups of {self.experts // groups} experts"
            raise ValueError(f"top_k={self.top_k} is more than the {reach} a token may choose from")

    def _check_bias(self) -> None:
        if self.bias is None:
            return
        if not self.biased:
            raise ValueError(
                f"routing {self.method} has no correction bias, got one of {list(self.bias.shape)}"
            )
        if self.bias.shape != (self.experts,) or self.bias.dtype != torch.float32:
            got = f"{list(self.bias.shape)} {self.bias.dtype}"
            raise ValueError(f"a correction bias must be [{self.experts}] torch.float32, got {got}")
        if not self.bias.isfinite().all():
            raise ValueError("a correction bias must be finite")

    @property
    def constants(self) -> dict[str, object]:
        """All that a caller's router has, too, by name: everything but the correction bias."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "bias"}

    def with_bias(self, bias: Tensor) -> Gate:
        """This gate with its correction bias [E], any float dtype, on the device of the logits."""
        return replace(self, bias=bias.float())

    @property
    def takes_logits(self) -> bool:
        """Whether logits determine the choice, once a correction bias is there."""
        return not self.by_token and not self.by_model

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts for `logits [T, E]` (any float dtype) -> ids [T, K] int32, weights [T, K] float32.

        Ids stand by falling score, equal scores by rising id. A NaN logit counts as -inf, +inf as the largest
        float32, and every weight is finite: a token with no other logits gets ids 0, 1, ... and weights 0.
        ValueError: another shape, a correction bias that is still missing, or a layer that routes by token
        id.
        """
        self.check(logits)
        if self.in_one_launch(logits):
            from moeserve.experts.routing.choice_kernels import choose

            chosen: tuple[Tensor, Tensor] = choose(self, logits.contiguous())  # type: ignore[no-untyped-call]
            return chosen
        entry, scores = ROUTINGS[self.method], self._scores(logits)
        experts = entry.choose(scores, self)
        return experts.int(), self._weights(scores.gather(-1, experts), logits.dtype)

    def check(self, logits: Tensor) -> None:
        """Raises ValueError as `route` does."""
        if self.by_model:
            raise ValueError(f"send ids and weights, not logits: {self.by_model}")
        if self.by_token:
            raise ValueError("logits do not tell the experts of a layer that chooses them by token id")
        if self.biased and self.bias is None:
            raise ValueError(
                f"routing {self.method} needs its correction bias [{self.experts}]: see with_bias"
            )
        self._check_logits(logits)

    def in_one_launch(self, logits: Tensor) -> bool:
        """Whether the GPU kernel serves this gate: it chooses by score, among groups of powers of two."""
        entry, even = (
            ROUTINGS[self.method],
            self.groups == 1 or (self.experts & -self.experts) == self.experts,
        )
        known = entry.choose is choose_by_score and not self.logits_dtype_scores
        known = known and self.epsilon == RENORMALIZE_EPSILON
        return kernels_serve(logits.device) and known and even and self.experts <= MOST_EXPERTS

    def weigh(self, logits: Tensor, experts: Tensor) -> Tensor:
        """Weights [T, K] float32 of experts that something else chose: `logits [T, E]`, ids `experts [T, K]`.

        For hash-routed layers (DeepSeek-V4), where a table gives each token id its experts; needs no bias.
        ValueError: a layer that only its model can route.
        """
        if self.by_model:
            raise ValueError(f"send ids and weights, not logits: {self.by_model}")
        return self._weights(self._scores(logits).gather(-1, experts.long()), logits.dtype)

    def _check_logits(self, logits: Tensor) -> None:
        if logits.ndim != 2 or logits.shape[1] != self.experts:
            raise ValueError(f"router logits must be [T, {self.experts}], got {list(logits.shape)}")

    def _scores(self, logits: Tensor) -> Tensor:
        self._check_logits(logits)
        values = logits if self.logits_dtype_scores else logits.float()
        lowest, highest = float("-inf"), torch.finfo(values.dtype).max
        return SCORES[str(self.scoring)](values.nan_to_num(lowest, highest, lowest))

    def _weights(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        weights = ROUTINGS[self.method].weigh(chosen, self) * self.scaling
        if self.logits_dtype_weights:
            weights = weights.to(dtype)
        return weights.float().nan_to_num(0.0, neginf=0.0)

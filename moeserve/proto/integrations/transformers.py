"""The transformers plug-in: a model keeps attention and routers, and asks moeserve for its experts.

model = load("path/to/checkpoint", "127.0.0.1:50051")  # reads everything but the experts' weights
attach(model, "127.0.0.1:50051")  # or: a model that is there already

Works for every model class whose experts use transformers' experts interface. Needs the extra
`transformers`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moeserve.proto import moe_pb2
from moeserve.proto.client import MoeClient

IMPLEMENTATION = "moeserve"
"""The name under which transformers knows these experts (`experts_implementation`)."""

_ALL_ROWS = "it weights rows before its experts, and calls them with every row for every expert and no choice"
UNLIKE = {"llama4": _ALL_ROWS, "llama4_text": _ALL_ROWS}
"""Why a model type that moeserve can serve cannot be attached, by `model_type`."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class Service(Protocol):
    """What a model needs of a client: `MoeClient` is one."""

    def forward(self, layer: int, hidden: Tensor, experts: Tensor, weights: Tensor) -> Any:
        """One layer's experts, mixed: [T, H] on the CPU, in the dtype of `hidden`."""

    def model(self) -> moe_pb2.GetModelReply:
        """The description of the model that is served."""


@dataclass(frozen=True, eq=False)
class Remote:
    """The remote weights of an experts module: decoder layer `layer` of `service`."""

    service: Service
    layer: int

    def forward(self, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Mixed rows [T, H] where `hidden` lies; experts [T, K] int64, -1 = none; weights [T, K]."""
        answer = self.service.forward(self.layer, hidden, experts, weights)
        # a copy, since models add to it in place and it may lie in the reply's own bytes
        return cast(Tensor, answer).to(hidden.device, copy=True)


_REMOTES: WeakKeyDictionary[Module, Remote] = WeakKeyDictionary()


class _Ask(torch.autograd.Function):
    """A call of the service, as a node that refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, experts: Tensor, weights: Tensor, remote: Remote) -> Tensor:
        return remote.forward(hidden, experts, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("experts behind moeserve give no gradients; call the model under torch.no_grad()")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts_forward(
    module: Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts implementation: mixed rows [T, H] for hidden_states [T, H] and a choice [T, K] of experts.

    Ids from `num_experts` on are how transformers' expert parallelism says none. RuntimeError: the module was
    never attached. MoeError: the service did not answer.
    """
    remote = _REMOTES.get(module)
    if remote is None:
        name = type(module).__name__
        raise RuntimeError(f"this {name} has no service; call attach(model, service) after making the model")
    experts = top_k_index.masked_fill(top_k_index >= cast(int, module.num_experts), -1)
    return cast(Tensor, _Ask.apply(hidden_states, experts, top_k_weights, remote))  # type: ignore[no-untyped-call]


def register() -> None:
    """Makes `experts_implementation="moeserve"` known to transformers; again is harmless."""
    for interface in (ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS):
        interface.register(IMPLEMENTATION, experts_forward)


def attach(model: Any, service: Service | str) -> Service:
    """Puts the experts of `model` behind `service`, a client or an address, and returns the client.

    model: a transformers model. Weights that the model holds for them are kept but no longer used. Raises
    ValueError for a model that cannot be attached, or is not the one served.
    """
    modules = experts_modules(model)
    client: Service = MoeClient(service) if isinstance(service, str) else service
    try:
        _check_served(model, modules, client.model())
    except BaseException:
        if isinstance(service, str) and isinstance(client, MoeClient):
            client.close()
        raise
    register()
    model.set_experts_implementation(IMPLEMENTATION)
    for layer, (name, module) in modules.items():
        if cast(Any, module).config._experts_implementation != IMPLEMENTATION:
            raise ValueError(f"transformers does not let {name} of {type(model).__name__} be replaced")
        _REMOTES[module] = Remote(client, layer)
    return client


def load(
    path: str, service: Service | str, *, cls: Any = AutoModelForCausalLM, **options: Any
) -> PreTrainedModel:
    """A model of `cls` from the checkpoint at `path`, without its experts' weights, attached to `service`.

    The experts' weights take neither memory nor reading. options: as `from_pretrained` takes them, `dtype`
    among them. Raises ValueError as `attach` does.
    """
    with without_expert_weights():
        model = cls.from_pretrained(path, **options)
    held = [
        name for name, module in experts_modules(model).values() if any(True for _ in module.parameters())
    ]
    if held:
        raise RuntimeError(f"this transformers version loaded the weights of {held[0]} all the same")
    attach(model, service)
    return cast(PreTrainedModel, model)


def experts_modules(model: Module) -> dict[int, tuple[str, Module]]:
    """Name and module of the experts of each decoder layer that has some, by the layer's index.

    ValueError: there are none, they do not use transformers' experts interface, or do what no service does.
    """
    found: dict[int, tuple[str, Module]] = {}
    for name, module in model.named_modules():
        # only transformers' decorator `use_experts_implementation` sets this on a module
        if getattr(module, "_is_expert_parallel", None) is None:
            continue
        numbers = _LAYER.findall(name)
        if len(numbers) != 1 or int(numbers[0]) in found:
            raise ValueError(f"{name} of {type(model).__name__} is not the experts of one decoder layer")
        if module.has_post_expert_norm:
            raise ValueError(
                f"{name} of {type(model).__name__} norms each expert's answer; moeserve does not"
            )
        found[int(numbers[0])] = (name, module)
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", "")
        why = UNLIKE.get(kind, "none of its modules uses transformers' experts interface")
        raise ValueError(f"{type(model).__name__} ({kind}) cannot be put behind moeserve: {why}")
    return found


def drop_expert_weights(model: Module) -> list[str]:
    """Lets go of all weights of the model's experts; returns the names of their modules."""
    names = []
    for name, module in experts_modules(model).values():
        for parameter in list(module._parameters):
            module._parameters[parameter] = None
        module._is_hf_initialized = True  # type: ignore[assignment]  # or transformers would fill what is gone
        names.append(name)
    return names


_LOADING = threading.RLock()


@contextmanager
def without_expert_weights() -> Iterator[None]:
    """Inside, models that this thread makes with `from_pretrained` come without their experts' weights.

    ValueError, from `from_pretrained`, for a model that could not be attached. Other threads are not
    affected; those that enter this context wait.
    """
    thread, plan = threading.get_ident(), PreTrainedModel._get_dtype_plan

    def drop_then_plan(model: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() == thread:
            absent = {rf"^{re.escape(name)}\." for name in drop_expert_weights(model)}
            model._keys_to_ignore_on_load_unexpected |= absent
        return plan(model, *args, **options)

    with _LOADING:
        # asked once of each model: its modules are final by then, and neither placed nor read yet
        PreTrainedModel._get_dtype_plan = drop_then_plan
        try:
            yield
        finally:
            PreTrainedModel._get_dtype_plan = plan


def _check_served(model: Any, modules: dict[int, tuple[str, Module]], served: moe_pb2.GetModelReply) -> None:
    """ValueError unless `served` has the experts that `modules` of `model` stand for."""
    declared = model.config.architectures or []
    if declared and served.architecture not in declared:
        raise ValueError(f"the model is {declared[0]}, but {served.model} is served, {served.architecture}")
    layers = {info.layer: info for info in served.layers}
    absent = sorted(set(modules) - set(layers))
    if absent:
        raise ValueError(
            f"layers {absent} of the model have experts, but {served.model} serves only {sorted(layers)}"
        )
    hidden = model.config.get_text_config().hidden_size
    for layer, (name, module) in modules.items():
        ours = (cast(int, module.num_experts), hidden)
        theirs = (layers[layer].experts, layers[layer].hidden)
        if ours != theirs:
            raise ValueError(f"{name}: E, H = {ours} in the model, {theirs} in what {served.model} serves")

"""How to build, feed and train every layer and ready-made model of netcl, at small sizes.

A recipe's name is the class's, by module: ``"layers.Linear"``; what stands after a colon tells variants apart.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import netcl.nn as nn
import numpy as np
import numpy.typing as npt
import pyopencl as cl
from netcl import autograd as ag
from netcl.nn import factory, layers
from netcl.nn.containers import SiLU
from netcl.nn.margin import MarginHead
from netcl.nn.modules import Sequential as PlainSequential
from netcl.nn.residual import basic_block
from netcl.nn.resnet import ResNet18
from netcl.nn.simple import SimpleCNN

from clamp.bridge import Node, Parameter, Tensor
from clamp.patching.patch_registry import netcl_modules
from tests.reference import quantize, to_device

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Fixed:
    """An input without a gradient: a target, labels."""

    array: Array


@dataclass(frozen=True)
class Recipe:
    """One layer or model.

    Attributes:
        build: makes it, on a queue.
        inputs: arrays (trained with the parameters), Fixed arrays, or anything else as it is.
        call: runs it on its inputs; by default the model itself.
        parameters: its trained tensors; by default its own list.
        result: dtype of its result for 16-bit inputs: "half", "float", or "none" for what has no forward of tensors.
        slack: factor on the tolerance of its gradients, for what amplifies rounding.
        slow: part of the full sweep only.
    """

    build: Callable[[cl.CommandQueue], Any]
    inputs: tuple[Any, ...]
    call: Callable[..., Any] = lambda model, *inputs: model(*inputs)
    parameters: Callable[[Any], list[Tensor]] = lambda model: list(model.parameters())
    result: str = "half"
    slack: float = 1.0
    slow: bool = False
    infers: bool = True


def values(*shape: int, seed: int = 0) -> Array:
    """Normal numbers that every storage type holds exactly."""
    return quantize(np.random.default_rng(seed).standard_normal(shape), "bfloat16").astype(np.float32)


def labels(*numbers: int) -> Fixed:
    return Fixed(np.array(numbers, np.int32))


def targets(*shape: int) -> Fixed:
    return Fixed(values(*shape, seed=1))


IMAGE = values(2, 4, 6, 5)
ROWS = values(5, 6)
TEXT = values(2, 5, 8)
PHOTO = values(2, 3, 32, 32)

RECIPES: dict[str, Recipe] = {
    # layers.py
    "layers.Linear": Recipe(lambda q: nn.Linear(q, 6, 3), (ROWS,)),
    "layers.Linear:3d": Recipe(lambda q: nn.Linear(q, 8, 3, bias=False), (TEXT,)),
    "layers.ReLU": Recipe(lambda q: nn.ReLU(), (ROWS,)),
    "layers.Sigmoid": Recipe(lambda q: nn.Sigmoid(), (ROWS,)),
    "layers.Tanh": Recipe(lambda q: nn.Tanh(), (ROWS,)),
    "layers.LeakyReLU": Recipe(lambda q: nn.LeakyReLU(0.1), (ROWS,)),
    "layers.Dropout": Recipe(lambda q: nn.Dropout(0.5, seed=3), (ROWS,)),
    "layers.MaxPool2d": Recipe(lambda q: nn.MaxPool2d(2, 2), (IMAGE,)),
    "layers.Flatten": Recipe(lambda q: nn.Flatten(), (IMAGE,)),
    "layers.Conv2d": Recipe(lambda q: nn.Conv2d(q, 4, 3, 3, pad=1), (IMAGE,)),
    "layers.Conv2d:grouped": Recipe(lambda q: nn.Conv2d(q, 4, 6, 3, stride=2, pad=2, dilation=2, groups=2), (IMAGE,)),
    "layers.Sequential": Recipe(lambda q: network(q), (values(2, 3, 8, 8),), slack=3),
    "layers.LayerNorm": Recipe(lambda q: nn.LayerNorm((6,), queue=q), (ROWS,), result="float"),
    "layers.MultiheadAttention": Recipe(
        lambda q: nn.MultiheadAttention(8, 2, queue=q), (TEXT,), call=lambda model, x: model(x, x, x)
    ),
    "layers.TransformerEncoderLayer": Recipe(
        lambda q: nn.TransformerEncoderLayer(8, 2, 16, queue=q), (TEXT,), result="float"
    ),
    "layers.MSELoss": Recipe(lambda q: nn.MSELoss(), (ROWS, targets(5, 6)), result="float", infers=False),
    "layers.L1Loss": Recipe(lambda q: nn.L1Loss(), (ROWS, targets(5, 6)), result="float", infers=False),
    "layers.SmoothL1Loss": Recipe(lambda q: nn.SmoothL1Loss(0.7), (ROWS, targets(5, 6)), result="float", infers=False),
    "layers.BCEWithLogitsLoss": Recipe(
        lambda q: nn.BCEWithLogitsLoss(), (ROWS, Fixed((values(5, 6, seed=2) > 0).astype(np.float32))),
        result="float", infers=False,
    ),
    "layers.TripletMarginLoss": Recipe(
        lambda q: nn.TripletMarginLoss(2.0), (ROWS, values(5, 6, seed=3), values(5, 6, seed=4)),
        result="float", infers=False,
    ),
    "layers.InfoNCELoss": Recipe(
        lambda q: nn.InfoNCELoss(0.5), (ROWS, values(5, 6, seed=3)), result="float", infers=False
    ),
    "layers.BatchHardTripletLoss": Recipe(
        lambda q: nn.BatchHardTripletLoss(8.0), (ROWS, labels(0, 1, 0, 1, 1)), result="float", infers=False
    ),
    "layers.BatchAllTripletLoss": Recipe(
        lambda q: nn.BatchAllTripletLoss(8.0), (ROWS, labels(0, 1, 0, 1, 1)), result="float", infers=False
    ),
    "layers.ContrastiveLoss": Recipe(
        lambda q: nn.ContrastiveLoss(4.0),
        (ROWS, values(5, 6, seed=3), Fixed(np.array([0, 1, 0, 1, 1], np.float32))),
        result="float", infers=False,
    ),
    # batchnorm.py
    "batchnorm.BatchNorm2dModule": Recipe(lambda q: nn.BatchNorm2d(q, 4), (IMAGE,)),
    # containers.py
    "containers.ModuleList": Recipe(
        lambda q: nn.ModuleList([nn.Linear(q, 6, 4), nn.ReLU()]), (ROWS,), call=lambda model, x: model[1](model[0](x))
    ),
    "containers.ModuleDict": Recipe(
        lambda q: nn.ModuleDict({"a": nn.Linear(q, 6, 4)}), (ROWS,), call=lambda model, x: model["a"](x)
    ),
    "containers.Identity": Recipe(lambda q: nn.Identity(), (ROWS,)),
    "containers.GELU": Recipe(lambda q: nn.GELU(), (ROWS,)),
    "containers.GELU:exact": Recipe(lambda q: nn.GELU(approximate=False), (ROWS,)),
    "containers.SiLU": Recipe(lambda q: SiLU(), (ROWS,)),
    "containers.ELU": Recipe(lambda q: nn.ELU(0.7), (ROWS,)),
    "containers.Softplus": Recipe(lambda q: nn.Softplus(), (ROWS,), result="float"),
    "containers.HardSigmoid": Recipe(lambda q: nn.HardSigmoid(), (ROWS,)),
    "containers.HardSwish": Recipe(lambda q: nn.HardSwish(), (ROWS,)),
    "containers.HardTanh": Recipe(lambda q: nn.HardTanh(-0.5, 0.5), (ROWS,)),
    "containers.Softmax": Recipe(lambda q: nn.Softmax(), (ROWS,), result="float"),
    "containers.PReLU": Recipe(lambda q: nn.PReLU(4, queue=q), (IMAGE,)),
    "containers.AvgPool2d": Recipe(lambda q: nn.AvgPool2d(2), (IMAGE,)),
    "containers.GlobalAvgPool2d": Recipe(lambda q: nn.GlobalAvgPool2d(), (IMAGE,)),
    "containers.AdaptiveAvgPool2d": Recipe(lambda q: nn.AdaptiveAvgPool2d(1), (IMAGE,)),
    "containers.Upsample": Recipe(lambda q: nn.Upsample(scale_factor=2), (IMAGE,), result="float"),
    "containers.Upsample:bilinear": Recipe(
        lambda q: nn.Upsample(size=(9, 4), mode="bilinear"), (IMAGE,), result="float"
    ),
    "containers.Concat": Recipe(lambda q: nn.Concat(1), (ROWS, values(5, 2))),
    "containers.GroupNorm": Recipe(lambda q: nn.GroupNorm(2, 4, queue=q), (IMAGE,), result="float"),
    "containers.Embedding": Recipe(lambda q: nn.Embedding(7, 4, queue=q), (labels(1, 3, 1, 6),), result="float"),
    "containers.ConvTranspose2d": Recipe(lambda q: nn.ConvTranspose2d(4, 3, 3, stride=2, pad=1, queue=q), (IMAGE,)),
    "containers.DepthwiseConv2d": Recipe(lambda q: nn.DepthwiseConv2d(4, 3, pad=1, queue=q), (IMAGE,)),
    # transformer.py, modern.py
    "transformer.CausalSelfAttention": Recipe(lambda q: nn.CausalSelfAttention(8, 2, queue=q), (TEXT,)),
    "transformer.TransformerBlock": Recipe(lambda q: nn.TransformerBlock(8, 2, queue=q), (TEXT,)),
    "transformer.PositionalEmbedding": Recipe(
        lambda q: nn.PositionalEmbedding(9, 4, queue=q, init_std=1.0), (5,), result="float"
    ),
    "modern.RMSNorm": Recipe(lambda q: nn.RMSNorm(6, queue=q), (ROWS,), result="float"),
    "modern.RotaryAttention": Recipe(lambda q: nn.RotaryAttention(8, 2, queue=q), (TEXT,)),
    "modern.SwiGLU": Recipe(lambda q: nn.SwiGLU(8, 6, queue=q), (TEXT,)),
    "modern.DecoderBlock": Recipe(lambda q: nn.DecoderBlock(8, 2, hidden=6, queue=q), (TEXT,)),
    "modern.TiedLinear": Recipe(
        lambda q: nn.TiedLinear(Parameter.from_host(q, values(5, 8))), (TEXT,), parameters=lambda model: [model.weight]
    ),
    # models
    "modules.Sequential": Recipe(
        lambda q: PlainSequential(nn.Linear(q, 6, 4), nn.ReLU()), (ROWS,),
        parameters=lambda model: model.layers[0].parameters(),
    ),
    "margin.MarginHead": Recipe(
        lambda q: MarginHead(6, 3, queue=q), (ROWS, labels(0, 2, 1, 1, 0)), call=lambda model, x, y: model.loss(x, y),
        result="float", infers=False,
    ),
    "margin.MarginHead:cosface": Recipe(
        lambda q: MarginHead(6, 3, mode="cosface", sub_centers=2, queue=q), (ROWS, labels(0, 2, 1, 1, 0)),
        call=lambda model, x, y: model.loss(x, y), result="float", infers=False,
    ),
    "residual.basic_block": Recipe(
        lambda q: [Parameter.from_host(q, values(*s) * 0.3) for s in ((4, 4, 3, 3), (4,), (4, 4, 3, 3), (4,))],
        (IMAGE,), call=lambda model, x: basic_block(x, *(ag.tensor(w, requires_grad=True) for w in model)),
        parameters=lambda model: model,
    ),
    "simple.SimpleCNN": Recipe(lambda q: SimpleCNN(3, 3, 4, 4, 8, queue=q), (PHOTO,), slack=2),
    "resnet.ResNet18": Recipe(lambda q: ResNet18(q, 3, 4), (values(4, 3, 16, 16),), slack=16, infers=False),
    "factory.tiny_cnn_config": Recipe(lambda q: built(q, factory.tiny_cnn_config(3, 3, 4, 4)), (PHOTO,), slack=2),
    "factory.fast_cnn_config": Recipe(lambda q: built(q, factory.fast_cnn_config(3, 3, 4, 4)), (PHOTO,), slack=2),
    "factory.fast_bn_cnn_config": Recipe(
        lambda q: built(q, factory.fast_bn_cnn_config(3, 3, 4, 4, p=0.0)), (PHOTO,), slack=3
    ),
    "factory.big_cnn_config": Recipe(
        lambda q: built(q, factory.big_cnn_config(3, 3, 4, 4, 4, p=0.0)), (PHOTO,), slack=10, slow=True
    ),
    "factory.example_cnn_config": Recipe(
        lambda q: built(q, factory.example_cnn_config(3, 3)), (PHOTO,), slack=2, slow=True
    ),
    "factory.example_mlp_config": Recipe(lambda q: built(q, factory.example_mlp_config(6, 8, 3)), (ROWS,)),
}  # fmt: skip

#: what stands among netcl's layers and models and computes nothing, or has a test of its own
NO_RECIPE = {
    "layers.Module": "the base class",
    "modules.Module": "the base class",
    "modules.Callback": "no layer",
    "modules.CallbackList": "no layer",
    "factory.LayerSpec": "no layer",
    "state.IncompatibleKeys": "no layer",
    "layers.BCELoss": "banned: test_models.py",
    "modern.KVCache": "test_inference.py decodes with it",
}


def network(queue: cl.CommandQueue) -> layers.Sequential:
    """A Sequential of everything that netcl fuses in training."""
    return nn.Sequential(
        nn.Conv2d(queue, 3, 4, 3, pad=2, dilation=2), nn.ReLU(),
        nn.Conv2d(queue, 4, 4, 3, pad=1, groups=2), nn.ReLU(),
        nn.Conv2d(queue, 4, 4, 3, pad=1), nn.BatchNorm2d(queue, 4), nn.ReLU(),
        nn.Conv2d(queue, 4, 4, 3, pad=1), nn.BatchNorm2d(queue, 4), nn.LeakyReLU(0.1), nn.MaxPool2d(2, 2),
        nn.Flatten(), nn.Linear(queue, 64, 8), nn.ReLU(), nn.Linear(queue, 8, 3),
    )  # fmt: skip


def built(queue: cl.CommandQueue, config: list[dict[str, Any]]) -> layers.Sequential:
    return nn.build_sequential(queue, config)


def classes() -> set[str]:
    """Names of all public classes of netcl.nn and of its ready-made configurations and blocks."""
    names = set()
    for module_name in netcl_modules():
        if not module_name.startswith("netcl.nn."):
            continue
        for name, x in vars(importlib.import_module(module_name)).items():
            is_ours = getattr(x, "__module__", None) == module_name and not name.startswith("_")
            is_model = inspect.isclass(x) or name.endswith(("_config", "_block"))
            if is_ours and is_model and not name.startswith("layer_to"):
                names.add(f"{module_name.removeprefix('netcl.nn.')}.{x.__name__}")
    return names


@dataclass
class Made:
    """A model built by a recipe, and its inputs on the device."""

    model: Any
    tensors: list[Any]
    trained: list[Tensor] = field(default_factory=list)

    def nodes(self) -> list[Any]:
        """The inputs as nodes."""
        return [as_node(x) for x in self.tensors]


def as_node(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.dtype == "int32":
        return x
    return ag.tensor(x, requires_grad=isinstance(x, Parameter))


def make(recipe: Recipe, queue: cl.CommandQueue, dtype: str = "float32") -> Made:
    """The same model and inputs at every call; inputs in ``dtype``."""
    np.random.seed(0)
    made = Made(recipe.build(queue), [])
    made.trained = recipe.parameters(made.model)
    for x in recipe.inputs:
        array = x.array if isinstance(x, Fixed) else x
        if not isinstance(array, np.ndarray):
            made.tensors.append(array)
        elif array.dtype == np.int32:
            made.tensors.append(Tensor.from_host(queue, array, dtype="int32"))
        elif dtype == "float32" and not isinstance(x, Fixed):
            made.tensors.append(Parameter.from_host(queue, array))
            made.trained = [*made.trained, made.tensors[-1]]
        else:
            made.tensors.append(to_device(queue, array, dtype))
    return made


@contextmanager
def training_fusion(enabled: bool) -> Iterator[None]:
    """netcl's fusion of layers in a Sequential that trains."""
    before = layers._TRAIN_FUSE
    layers.set_train_fusion(enabled)
    try:
        yield
    finally:
        layers.set_train_fusion(before)


def loss_of(recipe: Recipe, made: Made) -> Node:
    """A weighted sum of the result, small enough for half gradients at a loss scale of 2^10."""
    out = recipe.call(made.model, *made.nodes())
    shape = tuple(out.value.shape)
    weights = quantize(np.random.default_rng(7).uniform(0.5, 1.5, shape), "bfloat16").astype(np.float32)
    signs = np.where(np.arange(weights.size).reshape(shape) % 3 == 0, -1, 1)
    return ag.sum(ag.mul(out, ag.tensor(to_device(out.value.queue, weights * signs / max(weights.size, 4)))))

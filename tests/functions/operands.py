"""What the functions of clamp's are called with in these tests: leaves, and the casting of the policy half."""

from __future__ import annotations

from typing import Any

import pyopencl as cl

from clamp.bridge import Node
from clamp.casting.operands import Casting, say_nothing
from clamp.casting.policies import Half
from clamp.functions import OWNED
from tests.reference import to_device


def leaf(queue: cl.CommandQueue, values: Any, dtype: str = "float32", requires_grad: bool = True) -> Node:
    """A node of a leaf tensor."""
    tensor = to_device(queue, values, dtype)
    tensor.requires_grad = requires_grad
    return Node(value=tensor)


def call(name: str, casting: Casting, *args: Any, **kwargs: Any) -> Any:
    """Calls clamp's function by its name in netcl, or in netcl.autograd."""
    return OWNED[f"netcl.{name}" if "." in name else f"netcl.autograd.{name}"](casting, *args, **kwargs)


def half(dtype: str = "float16") -> Half:
    """The casting, which keeps no copies of weights and tells nobody."""
    return Half(dtype, say_nothing, use_cache=False)

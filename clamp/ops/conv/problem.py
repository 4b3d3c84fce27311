"""A convolution by values: its engine is chosen by them."""

from __future__ import annotations

from dataclasses import dataclass

from clamp.opencl.device import Capabilities
from clamp.ops.conv.geometry import Correlation, Pair, Window, forward, gradient, pair


@dataclass(frozen=True)
class Problem:
    """A convolution, or one of its gradients."""

    gradient: str  # what it is the gradient by: "", "input" or "weights"
    # storage types of what is multiplied: the source (the input; for its own gradient, the output's gradient) and the
    # weights (for their own gradient, the output's gradient)
    dtypes: tuple[str, str]
    out_dtype: str  # storage type of the result
    images: int  # of the batch
    image: Pair  # (H, W) of the input
    weights: tuple[int, ...]  # shape of the weights, (F, C / groups, KH, KW)
    window: Window
    device: Capabilities  # what the device can do
    verified: frozenset[str] = frozenset()  # names of the engines that must be verified on the device, and are

    def __str__(self) -> str:
        types, kernel = " by ".join(self.dtypes), " x ".join(map(str, self.extent))
        return f"{types} to {self.out_dtype}, a kernel of {kernel} with {self.window}"

    @property
    def channels(self) -> int:
        """Input channels of a group."""
        return self.weights[1]

    @property
    def features(self) -> int:
        """Output channels of a group."""
        return self.weights[0] // self.window.groups

    @property
    def extent(self) -> Pair:
        """(KH, KW)."""
        return pair(self.weights[2:])

    @property
    def size(self) -> Pair:
        """(OH, OW) of the output."""
        return self.window.output(self.image, self.extent)

    @property
    def forward(self) -> Correlation:
        """The convolution itself; also what its weights' gradient reads."""
        return forward(self.image, self.extent, self.window)

    @property
    def correlations(self) -> tuple[tuple[Correlation, ...], Pair]:
        """Correlations that the convolution or the input gradient consists of: one for each remainder of the position
        by the stride, row by row; and the remainders in both directions."""
        if self.gradient == "input":
            return gradient(self.image, self.size, self.extent, self.window)
        return (self.forward,), (1, 1)

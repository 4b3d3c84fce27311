"""A convolution's weights, in the order in which its kernels read them (kernels/conv_weights.cl)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.program import Kernel
from clamp.ops.conv.geometry import Correlation, Taps

_PACK = Kernel("conv_weights.cl", "pack_weights", "SRC")


@dataclass(frozen=True)
class PanelLayout:
    """Panels of weights as a kernel reads them: panels of rows, each a matrix [step][row], zero beyond the weights."""

    width: int
    short: int  # width, short: rows of a panel, and of the last ones, where that leaves fewer rows empty (0: of none)
    block: int  # steps of a panel that are read one after the other
    pairs: bool = False  # whether a step is a pair of bfloat16, of the elements 2 step and 2 step + 1, and not a float

    def heights(self, rows: int) -> tuple[int, int]:
        """Returns the numbers of panels with ``width`` rows and with ``short``, for so many rows."""
        most = -(-rows // self.width)
        if not self.short:
            return most, 0
        talls = range(most, max(most - 3, -1), -1)
        choices = [(tall, -(-max(0, rows - tall * self.width) // self.short)) for tall in talls]
        return min(choices, key=lambda choice: choice[0] * self.width + choice[1] * self.short)

    def padded(self, rows: int) -> int:
        """Rows of all the panels together."""
        tall, short = self.heights(rows)
        return tall * self.width + short * self.short


@dataclass(frozen=True)
class Weights:
    """A convolution's weights (F, C, KH, KW) as kernels read them: packed into panels, once for each layout and set
    of taps."""

    tensor: Tensor  # the weights; C counts the channels of one group
    groups: int  # F falls apart into as many groups
    transposed: bool  # whether sums run over F (the input gradient) and not over C (forward)
    _panels: dict[Hashable, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Channels that one group computes."""
        return self.tensor.shape[1] if self.transposed else self.tensor.shape[0] // self.groups

    @property
    def channels(self) -> int:
        """Channels that one group sums over."""
        return self.tensor.shape[0] // self.groups if self.transposed else self.tensor.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the panels take."""
        return sum(bridge.nbytes(panels) for panels in self._panels.values())

    def panels(self, shape: Correlation, layout: PanelLayout) -> Tensor:
        """Panels of the taps of a correlation (kernels/conv_weights.cl)."""
        taps = (shape.y.taps, shape.x.taps)
        return self.kept((layout, *taps), lambda: self._pack(layout, *taps))

    def kept(self, kind: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Panels of some kind, made when they are first asked for."""
        if kind not in self._panels:
            self._panels[kind] = make()
        return self._panels[kind]

    def places(self, y: Taps, x: Taps) -> tuple[int, ...]:
        """Layout of the weights of some taps: how many taps there are in both directions; how far apart groups, rows,
        channels are; the first tap; how far apart taps are in both directions."""
        w = self.tensor
        columns, taps, per_output = w.shape[3], w.shape[2] * w.shape[3], w.shape[1] * w.shape[2] * w.shape[3]
        strides = (taps, per_output) if self.transposed else (per_output, taps)
        first = y.first * columns + x.first
        return y.count, x.count, w.shape[0] // self.groups * per_output, *strides, first, y.step * columns, x.step

    def _pack(self, layout: PanelLayout, y: Taps, x: Taps) -> Tensor:
        w, rows, elements = self.tensor, self.rows, self.channels * y.count * x.count
        tall, short = layout.heights(rows)
        steps = -(-elements // 2) if layout.pairs else elements
        words = self.groups * steps * layout.padded(rows)  # of 32 bits, whatever they hold
        panels = bridge.empty(w.queue, (max(1, words),), "float32")
        if steps == 0 or rows == 0:
            return panels
        _PACK(
            w.queue, (tall + short, -(-steps // layout.block), self.groups), (1, 1, 1), w, panels,
            rows, elements, *self.places(y, x), tall,
            WIDTH=layout.width, SHORT=layout.short, KC=layout.block, PAIRS=int(layout.pairs),
        )  # fmt: skip
        return panels

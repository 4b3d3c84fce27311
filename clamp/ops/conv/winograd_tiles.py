"""The tiles of Winograd's sums, and the source laid out for them (kernels/winograd_kernels.clh)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.device import capabilities
from clamp.opencl.program import Kernel
from clamp.ops.conv.geometry import Pair

_OVERREAD = 16  # elements that may be read beyond a staged source: what 16 tiles read, of which one is real
_STAGED_BYTES = 256 * 2**20  # a larger batch is computed in slices
_STAGED_ROWS = 256  # of a work-item


_FILES = ("conv_winograd.cl", "conv_winograd_strided.cl")
_NAMES = ("stage_tiles", "winograd", "transform_weights", "weight_grad", "weight_grad_finish")
_KERNELS = {(file, name): Kernel(file, name) for file in _FILES for name in _NAMES}


@dataclass(frozen=True)
class Form:
    """A kind of convolution: what its file in kernels/ defines, by the same names.

    Attributes:
        edge, source_edge: rows and columns of a tile's outputs; and of the source, from a tile to the next.
        reach: rows and columns of the source that a tile reads beyond those.
        read_planes, places, weight_planes, grad_places: of a transformed tile of the source, of its sums, of the
            weights, and of a transformed tile of the outputs' gradient.
    """

    file: str
    edge: int
    source_edge: int
    reach: int
    read_planes: int
    places: int
    weight_planes: int
    grad_places: int
    options: tuple[tuple[str, int], ...] = ()

    @property
    def macros(self) -> dict[str, int]:
        """Macros of its kernels."""
        return dict(self.options)

    def kernel(self, name: str) -> Kernel:
        """A kernel of its file."""
        return _KERNELS[self.file, name]


PLAIN = Form(_FILES[0], 4, 4, 2, 36, 36, 36, 36)
STRIDED = Form(_FILES[1], 4, 8, 1, 81, 25, 81, 25, (("GRADIENT", 0),))
STRIDED_GRADIENT = Form(_FILES[1], 8, 4, 1, 25, 81, 81, 25, (("GRADIENT", 1),))


@dataclass(frozen=True)
class Tiles:
    """The tiles of an image's outputs."""

    form: Form
    rows: int
    columns: int

    @classmethod
    def of(cls, form: Form, size: Pair) -> Tiles:
        """Tiles of ``size`` outputs."""
        return cls(form, *(-(-extent // form.edge) for extent in size))

    @property
    def count(self) -> int:
        """Tiles of an image."""
        return self.rows * self.columns

    @property
    def staged(self) -> Pair:
        """Rows of a staged plane, and columns of a phase of a row."""
        return self.form.source_edge * self.rows + self.form.reach, self.columns + 1

    @property
    def plane(self) -> int:
        """Elements of a staged plane."""
        rows, columns = self.staged
        return rows * self.form.source_edge * columns

    @property
    def pieces(self) -> int:
        """Of 16 tiles that are transformed together, how many parts lie in rows of their own."""
        return 4 if self.columns <= 4 else 2 if self.columns <= 8 else 1


def slices(x: Tensor, tiles: Tiles) -> Iterator[tuple[int, int]]:
    """(first image, images) of the parts in which a batch is staged, so that the workspace stays small."""
    each = max(1, _STAGED_BYTES // max(1, 2 * x.shape[1] * tiles.plane))
    for first in range(0, x.shape[0], each):
        yield first, min(each, x.shape[0] - first)


def stage(x: Tensor, tiles: Tiles, first: int, images: int, pad: Pair) -> Tensor:
    """Images ``first`` and following of x (N, C, H, W), padded, laid out for tiles."""
    rows = images * x.shape[1] * tiles.staged[0]
    out = bridge.empty(x.queue, (images * x.shape[1] * tiles.plane + _OVERREAD,), x.dtype)
    each = max(1, min(_STAGED_ROWS, rows // (4 * capabilities(x.queue).compute_units)))
    tiles.form.kernel("stage_tiles")(
        x.queue, (-(-rows // each),), (1,), x, out, first * (x.size // x.shape[0]), x.size, rows,
        *x.shape[2:], *tiles.staged, *pad, each, STAGE=1, **tiles.form.macros,
    )  # fmt: skip
    return out

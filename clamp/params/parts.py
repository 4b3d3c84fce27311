"""Masters without memory of their own: a 16-bit parameter that is kept from step to step in 16 or 32 bits.

``optimizer.params`` has a float32 tensor in either case, the master. One in parts has no memory while nobody looks:
the launch that steps it reads and writes its parts, the model's parameter and what is left over of it. Whoever asks for
its memory (a checkpoint, a user who reads or writes it, netcl after AMP has ended) gets it whole, in float32; from then
on that counts, until the next step splits it again. Splitting what was put together gives the same parts.
"""

from __future__ import annotations

from typing import Any, ClassVar

from clamp import bridge
from clamp.bridge import Tensor
from clamp.opencl.host_steps import refuse
from clamp.ops.optimizer_step import PARTS, Copy, MultiUpdate, mixed
from clamp.ops.slots import in_turn

#: how a 16-bit parameter is kept from step to step, by the user's word for it
KEEPS: dict[bool | str, str] = {True: "copy", False: "rounded", **{name: name for name, n in PARTS.items() if n}}


class MasterInParts(Tensor):  # type: ignore[misc]  # netcl has no types
    """A master that consists of a 16-bit parameter and, where it is kept in two parts, 16 bits more."""

    is_in_parts: ClassVar[bool] = True
    exist: ClassVar[bool] = False  # whether there was ever one: else nobody need look for them
    parts: Copy
    _whole: Tensor | None

    @property
    def buffer(self) -> Any:
        """Its memory, in float32, which is made of the parts; what it holds counts from now on.

        Raises RuntimeError while launches are recorded, or ends that: whether it has memory changes from step to step,
        and replays would go on with what it had then.
        """
        refuse(
            "The memory of an fp32 master that is kept in 16-bit parts was asked for",
            "Read masters after the recorded part, or keep them in float32: master_weight=True.",
        )
        if self._whole is None and 0 not in self.shape:
            whole = bridge.empty(self.queue, self.shape, "float32")
            in_turn(MultiUpdate("join", 0, [whole], [], [self.parts]).pieces())
            self._whole = whole
        return self.memory

    @buffer.setter
    def buffer(self, buffer: Any) -> None:
        if self._whole is None or buffer is not self._whole.buffer:
            self._whole = Tensor(buffer, self.shape, "float32", self.context, self.queue, backend=self._backend)

    @property
    def held(self) -> list[Tensor]:
        """Returns the tensors that it holds besides the parameter: the other 16 bits, and its memory while it is
        whole."""
        return [part for part in (self.parts.rest, self._whole) if part is not None]

    @property
    def memory(self) -> Any:
        """Returns its memory, if somebody has asked for it since its last step; None otherwise."""
        return None if self._whole is None else self._whole.buffer

    @property
    def is_whole(self) -> bool:
        """Returns whether somebody has asked for its memory since its last step."""
        return self._whole is not None

    def split(self, turn: int | None = None) -> None:
        """Writes what its memory holds to the parts, and lets go of it.

        Args:
            turn: of a step that it has made: what is kept by chance is rounded so, and to nearest without.
        """
        if self._whole is not None and 0 not in self.shape:
            launches = MultiUpdate("none", 0, [self._whole], [], [self.parts], turns=turn is not None)
            in_turn(launches.pieces(turn=mixed(turn or 0)))
        self._whole = None


def put_in_parts(master: Tensor, model: Tensor, keeps: str, key: int) -> None:
    """Lets a master consist of a 16-bit parameter and what that leaves over.

    Args:
        keeps: one of ``PARTS``, of one or two.
        key: as of ``Copy``.
    """
    rest = bridge.empty(model.queue, model.shape, "bfloat16") if PARTS[keeps] == 2 else None
    if isinstance(master, MasterInParts):
        master.buffer  # noqa: B018  (puts together the parts that it had)
        whole = master._whole
    else:
        whole = bridge.take_storage(master)
        del vars(master)["buffer"]
        master.__class__ = MasterInParts
    assert isinstance(master, MasterInParts)
    MasterInParts.exist = True
    master.parts, master._whole = Copy(model, keeps, rest, key), whole
    master.split()


def make_whole(master: Tensor) -> None:
    """Gives a master in parts memory of its own, for good."""
    if not isinstance(master, MasterInParts):
        return
    master.buffer  # noqa: B018
    attributes, whole = master.__dict__, master._whole
    master.__class__ = Tensor
    attributes.update(buffer=None)
    if whole is not None:
        handle, whole.pool_handle = whole.pool_handle, None  # at once: of two owners both would give it back
        attributes.update(buffer=whole.buffer, pool_handle=handle)
    del attributes["parts"], attributes["_whole"]


def buffers_of(param: Tensor) -> list[Any]:
    """The buffers that a step writes to step a parameter."""
    if type(param) is not MasterInParts:
        return [param.buffer]
    return [part.buffer for part in (param.parts.tensor, param.parts.rest) if part is not None]

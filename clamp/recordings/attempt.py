"""An attempt to record: given up, not ended by an error, where a replay could not do what comes next.

By then the code that is being recorded has done a part of its work, an optimizer's step perhaps, and could not be run
again. So it runs on as it would without a recording, and right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from netcl.runtime.capture import KernelCapture

from clamp.bridge import Tensor
from clamp.opencl.host_steps import HostValue, value_now
from clamp.recordings.watch import Watch


@dataclass
class Upload:
    """An array of a call's that the code brings to the device.

    Attributes:
        given: what the code was given for the array.
        tensor: what it got.
        again: does it with another array.
    """

    given: HostValue
    tensor: Tensor
    again: Callable[[Any], Tensor]


class Attempt(KernelCapture):  # type: ignore[misc]
    """A list of launches that may be given up.

    Args:
        watch: what the code must not change itself, but in host steps.
        compares: whether it is only to be compared with an earlier one (comparison.py): nobody will replay it.
        raises: whether what no replay could do is an error, in the user's code, and does not end it.

    Attributes:
        why: why it was given up; empty if it was not.
        uploads: in the order in which they were made.
    """

    def __init__(self, watch: Watch, compares: bool = False, raises: bool = False) -> None:
        super().__init__()
        self.compares, self.raises = compares, raises
        self.why = ""
        self.uploads: list[Upload] = []
        self._watch = watch

    def give_up(self, why: str) -> None:
        """Ends the recording and drops what it has; what runs on is not recorded."""
        self.why = self.why or why
        self.clear()

    def change(self) -> str:
        """What the code has changed itself; empty if nothing."""
        return self._watch.change(libraries=False)

    @contextmanager
    def in_host_step(self) -> Iterator[None]:
        """Around a host step, which changes in every replay what it changes now."""
        flags = self._watch.flags()
        yield
        self._watch.follow(flags)

    def upload(self, from_host: Callable[..., Tensor], given: HostValue, args: Any, kwargs: Any) -> Tensor:
        """Brings an array of the call's to the device, and notes it."""

        def again(array: Any) -> Tensor:
            def put(x: Any) -> Any:
                return array if x is given else value_now(x)

            return from_host(*map(put, args), **{key: put(x) for key, x in kwargs.items()})

        self.uploads.append(Upload(given, again(value_now(given)), again))
        return self.uploads[-1].tensor

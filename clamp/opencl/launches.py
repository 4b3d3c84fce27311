"""Launches that are repeated: with most of their arguments the same, which the driver keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import call
from typing import Any

import numpy as np
import pyopencl as cl

from clamp.opencl.shortage import explain_shortage

# What stands there while nobody watches launches.
_own_call, _own_enqueue = cl.Kernel.__call__, cl.enqueue_nd_range_kernel


class Launch:
    """A launch of which only some arguments change: these alone are given to the driver each time.

    It passes by ``cl.Kernel.__call__``, unless somebody watches launches there (netcl's recorder, a count).

    Args:
        kernel: nobody else's, with its arguments set, or yet to be set where ``args`` is ``...``.
        args: as for `Kernel.bind`.
        known_as: the kernel that those see who watch.
    """

    def __init__(
        self, kernel: cl.Kernel, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, args: Sequence[Any],
        known_as: cl.Kernel | None = None,
    ) -> None:  # fmt: skip
        self._kernel, self._global_size, self._local_size, self._args = kernel, global_size, local_size, args
        self._known_as = known_as or kernel
        self._places = [place for place, arg in enumerate(args) if arg is ...]
        # of the types that were given last
        self._setters: tuple[list[type[Any]] | None, list[Callable[[Any], Any]]] = None, []

    @classmethod
    def like(
        cls, kernel: cl.Kernel, global_size: tuple[int, ...], local_size: tuple[int, ...] | None, args: Sequence[Any],
        places: Collection[int],
    ) -> Launch:  # fmt: skip
        """A call of a kernel, whoever's, to be repeated: with other buffers in some places.

        Args:
            args: all of them.
            places: numbers of the arguments that change.

        Raises:
            cl.Error: the driver makes no copies of kernels.
        """
        kernel.set_args(*args)  # it alone knows of which types its numbers are
        left_open = [... if place in places else arg for place, arg in enumerate(args)]
        return cls(kernel.clone(), global_size, local_size, left_open, kernel)

    def __call__(self, queue: cl.CommandQueue, *given: Any) -> None:
        """Launches it with these buffers and numbers in the places that were left open."""
        now = list(map(type, given))
        kinds, setters = self._setters
        if now != kinds:
            setters = self._set_up(now)
        try:
            if cl.Kernel.__call__ is not _own_call:
                changing = iter(given)
                args = [next(changing) if arg is ... else arg for arg in self._args]
                self._known_as(queue, self._global_size, self._local_size, *args)
                return
            list(map(call, setters, given))  # without a line of Python's for each
            cl.enqueue_nd_range_kernel(queue, self._kernel, self._global_size, self._local_size)
        except cl.Error as error:
            explain_shortage(error, f"launching {self._known_as.function_name}")
            raise

    def _set_up(self, kinds: list[type[Any]]) -> list[Callable[[Any], Any]]:
        """Returns functions that set arguments of these types: set_arg finds out by exceptions of C++ which of two
        kinds of memory one is of, unless it is that of the argument before (2 us), and that one is a number (20 us)."""
        if len(kinds) != len(self._places):
            raise TypeError(
                f"a launch of {self._known_as.function_name} leaves {len(self._places)} open, got {len(kinds)}"
            )
        kernel, setters = self._kernel, list[Callable[[Any], Any]]()
        for place, kind in zip(self._places, kinds, strict=True):
            name = "_set_arg_svm" if kind is cl.SVM else "_set_arg_buf" if issubclass(kind, np.generic) else "set_arg"
            setters.append(partial(getattr(kernel, name, kernel.set_arg), place))
        self._setters = kinds, setters
        return setters

    def unchanged(self, queue: cl.CommandQueue) -> Callable[[], Any] | None:
        """The launch without anything of Python's around it, for when nobody watches; None if arguments change."""
        if self._places:
            return None
        return partial(_own_enqueue, queue, self._kernel, self._global_size, self._local_size)


def launches_are_watched() -> bool:
    """Returns whether somebody has put something in the place of pyopencl's launches, to see what is launched."""
    return cl.Kernel.__call__ is not _own_call or cl.enqueue_nd_range_kernel is not _own_enqueue

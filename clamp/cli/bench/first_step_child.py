"""A process that trains one of the small networks for the first time, and says what that took.

Started by first_step.py, with another checkout of clamp on its path if that is to be measured: of clamp it uses what
every version has. It prints the seconds that this process's processors worked during the first step, what was compiled
in it and in the steps after it, and the launches of a step::

    python first_step_child.py mlp float16 PLATFORM DEVICE leave|keep
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pyopencl as cl

from clamp import amp


def main() -> None:
    """See above."""
    name, dtype, platform, number, then = sys.argv[1:]
    networks = _module("small_networks", Path(__file__).parent / "cases" / "small_networks.py")
    device = cl.get_platforms()[int(platform)].get_devices()[int(number)]
    context = cl.Context([device])
    queue = cl.CommandQueue(context, device)
    builds, launches = _counted(cl.Program, "build"), _counted(cl.Kernel, "__call__")
    network = getattr(networks, name)
    trainer = networks.Trainer(queue, network)
    queue.finish()

    began, built = time.process_time(), len(builds)
    handle = amp.init(dtype=dtype)
    trainer.step(handle).to_host()
    seconds, first = time.process_time() - began, len(builds) - built
    enqueued = len(launches)
    trainer.step(handle).to_host()
    enqueued = len(launches) - enqueued
    trainer.step(handle, network.batch - 3).to_host()
    if then == "keep":
        with suppress(ImportError):  # an older clamp keeps what it keeps at once
            from clamp.opencl.keeper import keep_in_background

            for process in keep_in_background():
                process.wait()
    print(
        json.dumps({"seconds": seconds, "programs": first, "later": len(builds) - built - first, "launches": enqueued})
    )
    sys.stdout.flush()
    os._exit(0)  # without the processes that would keep what was compiled


def _module(name: str, file: Path) -> Any:
    """This checkout's module, whichever clamp is on the path."""
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def _counted(owner: Any, name: str) -> list[str]:
    """A list that grows with each call of a function of pyopencl's."""
    calls: list[str] = []
    original = getattr(owner, name)

    def count(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    setattr(owner, name, count)
    return calls


if __name__ == "__main__":
    main()

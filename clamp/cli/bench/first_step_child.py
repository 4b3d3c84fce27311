"""A process that trains one of the small networks for the first time, and says what that took.

Started by first_step.py. What is measured may be another checkout: of clamp it uses what every version has. It prints
the seconds that this process's processors worked during the first step, what was compiled in it and in the steps after
it, and the launches of a step::

    python first_step_child.py CHECKOUT MLP float16 PLATFORM DEVICE leave|keep
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pyopencl as cl


def main() -> None:
    """See above."""
    checkout, name, dtype, platform, number, then = sys.argv[1:]
    _import_from(Path(checkout))
    amp = import_module("clamp.amp")
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
            for process in import_module("clamp.opencl.cache_writer").keep_in_background():
                process.wait()
    later = len(builds) - built - first
    print(json.dumps({"seconds": seconds, "programs": first, "later": later, "launches": enqueued}))
    sys.stdout.flush()
    os._exit(0)  # without the processes that would keep what was compiled


def _import_from(checkout: Path) -> None:
    """Takes clamp from a checkout, and not from where it is installed: its kernels and lists lie beside it there."""
    sys.path.insert(0, str(checkout))
    for part in ("kernels", "lists"):
        if (file := checkout / part / "__init__.py").is_file():
            _module(f"clamp.{part}", file, is_package=True)


def _module(name: str, file: Path, *, is_package: bool = False) -> Any:
    """The module in a file."""
    spec = spec_from_file_location(name, file, submodule_search_locations=[str(file.parent)] if is_package else None)
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

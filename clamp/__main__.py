"""``python -m clamp``: the command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from clamp.cli import SMALL_WORKS, arguments, main


def _bench_environment(works: Sequence[str]) -> dict[str, str]:
    """Returns what must stand in the environment before numpy and the OpenCL driver load, for timings to mean anything.

    Idle BLAS threads of this process would spin beside the device's; and without affinity PoCL's threads wander
    between cores, which makes timings of its kernels bimodal. Steps of small networks are timed as users have them:
    there a thread of PoCL's that must stay on one core waits for Python, or Python for it, and a step takes up to twice
    as long.
    """
    pinned = any(work not in SMALL_WORKS for work in works)
    return {"OPENBLAS_NUM_THREADS": "1", "POCL_AFFINITY": os.environ.get("POCL_AFFINITY", "01"[pinned])}


if __name__ == "__main__":
    if sys.argv[1:2] == ["bench"]:
        environment = _bench_environment(arguments().only)
        if any(os.environ.get(name) != value for name, value in environment.items()):
            # `import clamp` has loaded numpy by now, so the process starts over.
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **environment})
    # netcl's handler calls the one that it finds, and ends the process with 0, as if it were done, where there is none.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())

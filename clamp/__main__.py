"""``python -m clamp``: the command line."""

from __future__ import annotations

import os
import sys

from clamp.cli import main


def _bench_environment() -> dict[str, str]:
    """What must stand in the environment before numpy and the OpenCL driver load, for timings to mean anything.

    Idle BLAS threads of this process would spin beside the device's; and without affinity PoCL's threads wander
    between cores, which makes its timings bimodal.
    """
    return {"OPENBLAS_NUM_THREADS": "1", "POCL_AFFINITY": os.environ.get("POCL_AFFINITY", "1")}


if __name__ == "__main__":
    if sys.argv[1:2] == ["bench"] and any(os.environ.get(k) != v for k, v in _bench_environment().items()):
        # `import clamp` has loaded numpy by now, so the process starts over.
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **_bench_environment()})
    sys.exit(main())

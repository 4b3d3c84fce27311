"""Random training loops, and the seeds of their sweep."""

import os

# Part n of the sweep has seed FIRST_SEED + n: the same in every run, so that a failure is one for everybody;
# CLAMP_LOOP_SEED=$RANDOM looks for new ones.
FIRST_SEED = int(os.environ.get("CLAMP_LOOP_SEED", "1000"))
SWEEP = range(FIRST_SEED, FIRST_SEED + 4)

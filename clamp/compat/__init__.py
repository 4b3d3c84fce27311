"""The faces of other AMP systems: their names and argument forms, over clamp's one machinery."""

import clamp.recordings  # noqa: F401  (for what it meets, whichever face turns AMP on)

"""What AMP did: each op's result observed, its statistics, and what follows from them.

``session`` is what this room needs of ``clamp.session``, which stands above it: `clamp.debugging` hands it in.
"""

from __future__ import annotations

from typing import Any, Protocol

from clamp.casting.policy_table import PolicyTable


class Session(Protocol):
    """The AMP of the process."""

    def ensure_patched(self) -> None: ...
    def active_handle(self) -> Any: ...
    def policies_for(self, level: str) -> PolicyTable: ...
    def shutdown(self) -> None: ...


session: Session

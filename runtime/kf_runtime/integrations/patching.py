"""Patches: attributes that were replaced, so that they can be put back."""

from __future__ import annotations

from typing import Any, Final

_MISSING: Final = object()


class Patches:
    """Replaced attributes in order."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``; what the owner itself held is remembered."""
        before = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self._done.append((owner, name, before, value))

    def restore(self) -> None:
        """Put every attribute back, last first. One that somebody else replaced since is left as it is."""
        while self._done:
            owner, name, before, ours = self._done.pop()
            if vars(owner).get(name) is not ours:
                continue
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

"""Run something around a call that hooks only see the beginning of."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


def wrap_next_call(owner: Any, name: str, context: AbstractContextManager[Any]) -> None:
    """Let the next call of ``owner.name`` run inside ``context``.

    A hook's ``before_...`` has no counterpart that is called when the step between raises; the
    context is left in any case. The method is itself again as soon as it is called.
    """
    method, own = getattr(owner, name), name in vars(owner)

    def inside(*args: Any, **kwargs: Any) -> Any:
        if own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)
        with context:
            return method(*args, **kwargs)

    setattr(owner, name, inside)

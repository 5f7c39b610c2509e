"""A module's forward, wrapped so that the module stays what it is."""

from __future__ import annotations

import inspect
from functools import partial
from types import CodeType
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.jit import ScriptModule

THE_MODEL = 'the model'  # what errors call the outermost module, which has no name

Wrapper = TypeVar('Wrapper', bound='WrappedForward')


class WrappedForward:
    """Stands in a module's ``forward`` and calls the one it replaced.

    Names, parameters, hooks and state dict are untouched. It is an object and not a function, so
    that copies and pickles of the module are wrapped too, each around its own forward.
    """

    setting: ClassVar[str]  # what errors call it

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name or THE_MODEL, module
        # None for the class's own, which a traced module finds when it is asked for it only.
        is_scripted = isinstance(module, ScriptModule)
        self._replaced = module.forward if is_scripted else vars(module).get('forward')

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        raise NotImplementedError

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._replaced or partial(type(self.module).forward, self.module))

    @property
    def __code__(self) -> CodeType:
        """That of the forward, which ``torch.export`` asks for to say where a model stands."""
        return (self._replaced or type(self.module).forward).__code__

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The forward that was replaced."""
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def begin(self) -> None:
        """Take the forward's place."""
        vars(self.module)['forward'] = self

    def undo(self) -> None:
        """Put back what was replaced; other wrappers around the module's forward stay.

        Nothing where that has been done, so that an undo of many that was refused midway can be
        repeated.

        Raises:
            ValueError: When something that is no such wrapper has been put on top in the meantime.
        """
        outer = vars(self.module).get('forward')
        if outer is self:
            del vars(self.module)['forward']
            if self._replaced is not None:
                vars(self.module)['forward'] = self._replaced
            return
        while isinstance(outer, WrappedForward):
            if outer._replaced is self:
                outer._replaced = self._replaced
                return
            outer = outer._replaced
        if outer is None or outer is self._replaced:
            return
        raise ValueError(
            f'{self.setting}: the forward of {self.name} was wrapped again afterwards; undo '
            'that first'
        )


def wrapper_of(module: nn.Module, kind: type[Wrapper]) -> Wrapper | None:
    """The wrapper of one kind around the module's forward, at any depth."""
    forward = vars(module).get('forward')
    while isinstance(forward, WrappedForward):
        if isinstance(forward, kind):
            return forward
        forward = forward._replaced
    return None


def innermost_forward(module: nn.Module) -> Any:
    """The forward below all wrappers: its class's, or one that somebody has put in its place."""
    forward = vars(module).get('forward')
    while isinstance(forward, WrappedForward):
        forward = forward._replaced
    return forward or type(module).forward


def is_wrapped(module: nn.Module, kind: type[WrappedForward]) -> bool:
    """Whether a wrapper of one kind is around the module's forward, at any depth."""
    return wrapper_of(module, kind) is not None

"""Attributes of the strategy whose values one of its parts owns."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Owned(Generic[T]):
    """An attribute that is read from a part, and set there if it may change.

    Args:
        part: name of the attribute that holds the part.
        name: of the attribute there; by default the same one.
        may_change: whether it may be set.
    """

    def __init__(self, part: str, name: str = "", may_change: bool = False) -> None:
        self.part, self.name, self.may_change = part, name, may_change

    def __set_name__(self, owner: type, name: str) -> None:
        self.public, self.name = name, self.name or name

    def __get__(self, strategy: Any, owner: type) -> T:
        """The part's value; of the class itself, this descriptor."""
        found: T = self if strategy is None else getattr(getattr(strategy, self.part), self.name)  # type: ignore[assignment]
        return found

    def __set__(self, strategy: Any, value: T) -> None:
        if not self.may_change:
            raise AttributeError(f"{self.public} cannot be set: give it to {type(strategy).__name__}(...)")
        setattr(getattr(strategy, self.part), self.name, value)

"""EASE: the method, where its evidence comes from, how deep it goes and what keeps it down."""

from ease.methods.ease.method import Ease

__all__ = ["Ease"]

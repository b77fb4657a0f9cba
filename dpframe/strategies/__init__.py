"""Strategies say where a recipe runs; each is one file, and conf/strategy/ is the list of them."""

from dpframe.strategies.base import Strategy

__all__ = ["Strategy"]

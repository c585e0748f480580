"""Caches of results for layouts, which can be emptied together."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

T = TypeVar("T")

_LAYOUT_CACHES: list[_lru_cache_wrapper[Any]] = []


def layout_cache(maxsize: int) -> Callable[[Callable[..., T]], _lru_cache_wrapper[T]]:
    """Cache a function like `functools.lru_cache`, and register the cache for `empty_layout_caches`.

    Use it for every function of a module whose arguments or result can hold a layout. A layout
    holds its maps (`Owners`, `Needs`), and a map has a number for each row of an array: caches
    that nobody empties would keep the memory of thousands of old maps.

        @layout_cache(maxsize=4096)
        def local_shape(sharding: Sharding) -> tuple[int, ...]: ...
    """

    def registered(function: Callable[..., T]) -> _lru_cache_wrapper[T]:
        cache = lru_cache(maxsize=maxsize)(function)
        _LAYOUT_CACHES.append(cache)
        return cache

    return registered


def empty_layout_caches() -> None:
    """Forget all results that are cached for layouts; each is computed anew when it is asked for."""
    for cache in _LAYOUT_CACHES:
        cache.cache_clear()

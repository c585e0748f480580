"""Calls of torch functions, as a mode that watches them sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from torch_bridge.versions.pytree import tree_map_only

Rule = Callable[..., Any]  # applies a function to blocks: takes a `FunctionCall` first


class FunctionCall(NamedTuple):
    """A call `func(*args, **kwargs)` that has not run yet.

    Attributes:
        func: The torch function.
        args: Its arguments by position.
        kwargs: Its arguments by keyword.
        outputs: How the outputs of convolutions and pools are sharded, as for `domain_parallel`.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: str = ""

    @property
    def name(self) -> str:
        """The name of the function, or of the property that it reads, as "mT" for `x.mT`."""
        name: str = getattr(self.func, "__name__", str(self.func))
        if name == "__get__":
            name = self.func.__self__.__name__  # type: ignore[attr-defined]  # the descriptor's
        return name

    def run(self) -> Any:
        """Return what torch returns."""
        return self.func(*self.args, **self.kwargs)

    def tensors(self) -> Iterator[Tensor]:
        """Generate the tensors among the arguments, also inside lists and tuples."""
        return tensors_in((*self.args, *self.kwargs.values()))

    def map_tensors(self, change: Callable[[Tensor], Tensor]) -> FunctionCall:
        """Return the call with every tensor changed."""
        args, kwargs = tree_map_only(Tensor, change, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs)

    def arguments(self, *names: str, **defaults: Any) -> list[Any]:
        """Return arguments in the order of their names, whether they were given by position or by name.

        For `torch.cat([x, y], axis=1)`, `arguments("tensors", dim=0)` is `[[x, y], 1]`: the dim may
        also be called "axis", as in numpy.
        """
        order = (*names, *defaults)
        by_position = dict(zip(order, self.args, strict=False))
        values = {**defaults, **by_position, **self.kwargs}
        if "axis" in values:
            values["dim"] = values["axis"]
        return [values[name] for name in order]


def same_rule(names: str, rule: Rule) -> dict[str, Rule]:
    """Return a table that has one rule for several functions: "add sub" -> {"add": rule, "sub": rule}."""
    return dict.fromkeys(names.split(), rule)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Generate the tensors among values, also inside lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)

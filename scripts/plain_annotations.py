"""A griffe extension for the reference: types without the bounds that `Annotated` gives them."""

from typing import Any

import griffe

_MEANING = {"Seconds": "float", "MaxBad": "int | float"}


class PlainAnnotations(griffe.Extension):
    """Shows `Annotated[int, Least(1)]` as `int`."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Change the parameters of a function that has been loaded."""
        for parameter in func.parameters:
            parameter.annotation = _plain(parameter.annotation)

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Change a field of a dataclass that has been loaded."""
        attr.annotation = _plain(attr.annotation)


def _plain(shown: Any) -> Any:
    if isinstance(shown, griffe.ExprName):
        return _MEANING.get(shown.name, shown)
    if isinstance(shown, griffe.ExprSubscript):
        if str(shown.left) == "Annotated" and isinstance(shown.slice, griffe.ExprTuple):
            return _plain(shown.slice.elements[0])
        shown.slice = _plain(shown.slice)
    elif isinstance(shown, griffe.ExprTuple):
        shown.elements = [_plain(element) for element in shown.elements]
    elif isinstance(shown, griffe.ExprBinOp):
        shown.left, shown.right = _plain(shown.left), _plain(shown.right)
    return shown

"""Results that show themselves in a notebook, and that pandas can take over."""

from __future__ import annotations

from functools import singledispatch
from importlib.util import find_spec
from typing import TYPE_CHECKING

from minicluster.errors import InputError
from minicluster.pages.page import Section
from minicluster.pages.write import render_parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pandas import DataFrame

    from minicluster.pages.page import ChartRow

    Columns = Mapping[str, Sequence[object]]


@singledispatch
def sections_of(result: object) -> Sequence[Section | ChartRow]:  # noqa: ARG001  (by its type)
    """
    Return what is shown of a result, the answer in the first heading.

    Terminal, page and notebook show the same list; packages register it for their types.
    """
    return ()


@singledispatch
def columns_of(result: object) -> Columns:
    """Return a result as columns of equal lengths, by name; packages register it likewise."""
    raise TypeError(f"no columns are registered for {type(result).__name__}")


class Shown:
    """Base of results: `sections_of` and `columns_of` say what is shown of each type."""

    __slots__ = ()

    def _repr_html_(self) -> str | None:
        """Return the result as a notebook shows it, without charts; `None`: as text."""
        parts = [part for part in sections_of(self) if isinstance(part, Section)]
        return render_parts(parts) or None

    def to_frame(self) -> DataFrame:
        """Return the result as a pandas frame; columns carry their units in their names."""
        if find_spec("pandas") is None:
            raise InputError("pandas", None, "an installed package", "`pip install pandas`")
        from pandas import DataFrame  # noqa: PLC0415  (slow, and not everywhere)

        return DataFrame(dict(columns_of(self)))

"""One test over many cases: a parametrised test costs milliseconds of collection and reports for each of them."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each_case(
    names: str | Sequence[str],
    cases: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Iterable[object] | Callable[[Any], object] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test, which runs all cases and fails with the names of those that fail.

    For quick cases without marks. They share the fixtures of the test. A function is asked for the cases in the test.
    """
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    given = cases if callable(cases) else list(cases)

    def rows_of() -> dict[str, Any]:
        """Each case as a list of values, by its name with its number."""
        found = list(given() if callable(given) else given)
        assert found, f"no cases of {keys}"
        assert not any(isinstance(case, type(pytest.param())) for case in found), "a case has no marks"
        rows = [case if len(keys) > 1 else (case,) for case in found]
        if callable(ids):
            titles = ["-".join(str(ids(value)) for value in row) for row in rows]
        else:
            titles = list(map(str, ids)) if ids is not None else [", ".join(map(repr, row)) for row in rows]
        return {f"{number} {title}": row for number, (title, row) in enumerate(zip(titles, rows, strict=True))}

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def over_all(**fixtures: Any) -> None:
            errors: list[BaseException] = []
            rows = rows_of()
            for title, row in rows.items():
                try:
                    test(**fixtures, **dict(zip(keys, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 it is raised with the others
                    error.add_note(f"in the case {title}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(rows)} cases fail", errors)

        signature = inspect.signature(test)
        left = [each for name, each in signature.parameters.items() if name not in keys]
        assert len(left) + len(keys) == len(signature.parameters), f"{test.__name__} does not take {keys}"
        over_all.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return over_all

    return decorate

"""What ranks of two pools tell each other while they do something else: nobody waits for whoever is to read it."""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, TCPStore

OFFERS = "offers"


class Notices:
    """The store of a group in which some ranks train and others generate."""

    def __init__(self, store: TCPStore, rank: int, generators: Sequence[int]) -> None:
        """rank: of this process; generators: the ranks of the group that generate."""
        self._store = PrefixStore("notices", store)  # the group has keys of its own
        self._rank, self._generators = rank, generators

    def offer(self) -> None:
        """Say that the ranks that train are about to send weights."""
        if self._rank == 0:
            self._store.add(OFFERS, 1)

    @property
    def offers(self) -> int:
        """How often that was said."""
        return int(self._store.add(OFFERS, 0))

    def tell(self, number: int, value: int) -> None:
        """Tell all that generate the value of this one; number: of such values, from 1.

        It may be forgotten once all have told that of `number + 1`.
        """
        self._store.set(self._key(number, self._rank), f"{number} {value}")

    def told(self, number: int) -> list[int] | None:
        """The values of this number of all that generate; None until all have told theirs."""
        keys = [self._key(number, rank) for rank in self._generators]
        if not self._store.check(keys):
            return None
        found = [tuple(map(int, text.split())) for text in self._store.multi_get(keys)]
        return [value for each, value in found] if all(each == number for each, _ in found) else None

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"{number % 2}/{rank}"

"""Messages between the ranks of a training and a generating pool; the sender never waits for a reader."""

from collections.abc import Sequence

from torch._C._distributed_c10d import PrefixStore, TCPStore

OFFERS = "offers"


class Notices:
    """Messages in the TCPStore that training and generating ranks share: offers of weights, and a number per rank."""

    def __init__(self, store: TCPStore, rank: int, generators: Sequence[int]) -> None:
        """rank: this process's rank in the group; generators: the generating ranks of the group."""
        self._store = PrefixStore("notices", store)  # the group has keys of its own
        self._rank, self._generators = rank, generators

    def offer(self) -> None:
        """Announce that the training ranks are about to send weights."""
        if self._rank == 0:
            self._store.add(OFFERS, 1)

    @property
    def offers(self) -> int:
        """Number of announcements of new weights so far."""
        return int(self._store.add(OFFERS, 0))

    def tell(self, number: int, value: int) -> None:
        """Publish this generating rank's value for round `number` (from 1), for the group's generating ranks to read.

        Round `number + 2` overwrites the value. That round begins only after `told(number + 1)` has returned values.
        """
        self._store.set(self._key(number, self._rank), f"{number} {value}")

    def told(self, number: int) -> list[int] | None:
        """Return the values that all generating ranks published in a round; None until every rank has published."""
        keys = [self._key(number, rank) for rank in self._generators]
        if not self._store.check(keys):
            return None
        found = [tuple(map(int, text.split())) for text in self._store.multi_get(keys)]
        return [value for each, value in found] if all(each == number for each, _ in found) else None

    @staticmethod
    def _key(number: int, rank: int) -> str:
        return f"{number % 2}/{rank}"

"""Transfer protocols, what a rank sends of what it makes, and the references that a rank is sent."""

from dataclasses import replace
from itertools import product

import pytest

from rlhf_api.spec.parallel_sizes import ParallelSizes
from rlhf_trainer.controller.batch import BatchFuture, FieldFuture, Holders, Kept, RowBlock
from rlhf_trainer.controller.dispatch import Readers, dispatch
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL, THREE_D_PROTO, TransferProtocol
from rlhf_trainer.types import Transfer, transfers_of
from rlhf_trainer.workers.scoring import ScoringWorker
from tests.each import each_case


@each_case("rows", [0, 1, 5, 8])
@each_case("ranks", [1, 2, 3])
def test_dp_proto_covers_every_row_once_and_in_order(rows: int, ranks: int) -> None:
    shares = DP_PROTO.distribute(ParallelSizes(data=ranks), rows)
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_to_all_gives_every_rank_everything() -> None:
    assert ONE_TO_ALL.distribute(ParallelSizes(data=3), 4) == [range(4)] * 3


def made_by(pool: str, *rows: range | None) -> FieldFuture:
    """Field `tokens` of call 7, kept by the ranks of a pool; each of them has sent its rows as one block."""
    blocks = [RowBlock(part.start, part.stop, f"{pool} {rank}") for rank, part in enumerate(rows) if part is not None]
    return FieldFuture(call=7, name="tokens", holders=Holders(pool, rows), blocks=blocks)


def test_a_rank_is_sent_only_the_references_of_its_rows() -> None:
    """The paper's Figure 5(b): 3 producers, 2 consumers, each needs one and a half batches."""
    batch = BatchFuture(step=1, size=6, fields={"tokens": made_by("actor", range(2), range(2, 4), range(4, 6))})
    shares = DP_PROTO.distribute(ParallelSizes(data=2), batch.size)
    sent = [
        batch.slice(share, ["tokens"], pool="critic", rank=rank, reader="critic") for rank, share in enumerate(shares)
    ]
    assert [references for _, references in sent] == [["actor 0", "actor 1"], ["actor 1", "actor 2"]]
    assert [part.blocks["tokens"] for part, _ in sent] == [[range(2), range(2, 4)], [range(2, 4), range(4, 6)]]


def test_a_rank_is_sent_no_reference_to_what_its_process_keeps() -> None:
    """Under another name too; a rank whose rows are not all its own gets blocks."""
    batch = BatchFuture(step=1, size=4, fields={"tokens": made_by("actor", range(2), range(2, 4))})
    batch = BatchFuture(step=1, size=4).with_prefixed(greedy=batch)
    given, references = batch.slice(range(2, 4), ["greedy_tokens"], pool="actor", rank=1, reader="actor")
    assert (given.kept, given.blocks, references) == ({"greedy_tokens": Kept(7, "tokens", range(2, 4))}, {}, [])
    given, references = batch.slice(range(1, 3), ["greedy_tokens"], pool="actor", rank=1, reader="actor")
    assert (given.kept, references) == ({}, ["actor 0", "actor 1"])


def test_rows_that_were_not_sent_are_no_shorter_batch() -> None:
    field = FieldFuture(call=7, name="tokens", holders=Holders("actor", (range(4),)), blocks=[RowBlock(0, 2, "a")])
    with pytest.raises(AssertionError, match="tokens"):
        field.needed(range(1, 3))


def transfer(protocol: TransferProtocol, *, reads: tuple[str, ...] = (), adds: tuple[str, ...] = ()) -> Transfer:
    return Transfer(protocol=protocol, reads=reads, reads_if_there=(), adds=adds, phase="")


LAYOUTS = [
    ParallelSizes(pipeline=pipeline, tensor=tensor, data=4 // pipeline // tensor)
    for pipeline, tensor in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4))
]


@each_case("rows", [8, 5, 1])
@each_case(("made", "read"), list(product(LAYOUTS, LAYOUTS)))
def test_what_no_process_keeps_is_sent_and_nothing_else(made: ParallelSizes, read: ParallelSizes, rows: int) -> None:
    """Producer and reader on one pool, by any p-t-d: every rank gets its rows, from its process or from blocks."""
    readers = Readers()
    readers.add("all", read, transfer(THREE_D_PROTO, reads=("tokens",)))
    batch, adds = BatchFuture(step=1, size=rows), transfer(THREE_D_PROTO, adds=("tokens",))
    dealt = dispatch(batch, adds, readers, pool="all", layout=made, call=7, name="actor.make")
    outputs = [[(rank, part) for part in each.cuts.get("tokens", ())] for rank, each in enumerate(dealt.parts)]
    collected = dealt.collect(outputs)
    assert isinstance(collected, BatchFuture)
    used = set()
    for rank, share in enumerate(THREE_D_PROTO.distribute(read, rows)):
        given, references = collected.slice(share, ["tokens"], pool="all", rank=rank, reader="critic.read")
        used.update(references)
        if given.kept:
            assert not references
            assert made.coordinates(rank)["pipeline"] == made.pipeline - 1, "the last stage alone has an output"
            mine = THREE_D_PROTO.distribute(made, rows)[rank]
            assert (mine.start <= share.start, share.stop <= mine.stop) == (True, True)
        else:
            assert {row for _, part in references for row in part} >= set(share)
    assert used >= {each for rank in outputs for each in rank if len(each[1])}, "nothing is sent that nobody reads"
    if made == read and made.pipeline == 1:
        assert not used


def test_fields_of_another_pool_are_sent_for_its_readers_rows() -> None:
    readers = Readers()
    readers.add("left", ParallelSizes(data=2), transfer(DP_PROTO, reads=("tokens",)))
    readers.add("right", ParallelSizes(data=3), transfer(DP_PROTO, reads=("greedy_tokens",)))
    adds = transfer(DP_PROTO, adds=("tokens",))
    dealt = dispatch(
        BatchFuture(step=1, size=6), adds, readers, pool="left", layout=ParallelSizes(data=2), call=7, name="make"
    )
    assert [part.cuts["tokens"] for part in dealt.parts] == [
        [range(2), range(2, 3)],
        [range(3, 4), range(4, 6)],
    ], "the right pool reads them all, under the name that `with_prefixed` gives"


def test_ranks_that_do_not_call_the_users_code_fetch_its_scores() -> None:
    """A sum of a function and a tensor-parallel model: rank 0 alone has whole scores."""
    readers, layout = Readers(), ParallelSizes(tensor=2, data=1)
    readers.add("all", ParallelSizes(data=2), transfer(DP_PROTO, reads=("scores",)))
    scoring = replace(transfers_of(ScoringWorker)["compute_reward"], reads=(), reads_if_there=())
    batch = BatchFuture(step=1, size=8)
    dealt = dispatch(batch, scoring, readers, pool="all", layout=layout, call=7, name="reward.compute_reward")
    assert dealt.holders.rows == (range(8), None)
    assert dealt.parts[0].cuts["scores"] == [range(4, 8)], "what rank 1 reads"


def test_reading_a_missing_field_names_method_and_field() -> None:
    with pytest.raises(KeyError, match=r"critic\.update_critic reads returns; the batch holds nothing"):
        BatchFuture(step=1, size=2).slice(range(2), ["returns"], pool="a", rank=0, reader="critic.update_critic")

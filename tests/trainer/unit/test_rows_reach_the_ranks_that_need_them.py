"""Transfer protocols and the references that a rank is sent."""

import pytest

from rlhf_api.parallel_sizes import ParallelSizes
from rlhf_trainer.controller.batch import BatchFuture, RowBlock
from rlhf_trainer.protocols import DP_PROTO, ONE_TO_ALL


@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_dp_proto_covers_every_row_once_and_in_order(rows: int, ranks: int) -> None:
    shares = DP_PROTO.distribute(ParallelSizes(data=ranks), rows)
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_to_all_gives_every_rank_everything() -> None:
    assert ONE_TO_ALL.distribute(ParallelSizes(data=3), 4) == [range(4)] * 3


def test_a_rank_is_sent_only_the_references_of_its_rows() -> None:
    """The paper's Figure 5(b): 3 producers, 2 consumers, each needs one and a half batches."""
    blocks = [RowBlock(0, 2, "actor 0"), RowBlock(2, 4, "actor 1"), RowBlock(4, 6, "actor 2")]
    batch = BatchFuture(step=1, size=6, fields={"tokens": blocks})
    shares = DP_PROTO.distribute(ParallelSizes(data=2), batch.size)
    sent = [batch.slice(share, ["tokens"], reader="critic") for share in shares]
    assert [references for _, references in sent] == [["actor 0", "actor 1"], ["actor 1", "actor 2"]]
    assert [part.blocks["tokens"] for part, _ in sent] == [[range(2), range(2, 4)], [range(2, 4), range(4, 6)]]


def test_reading_a_field_that_is_not_there_names_the_method_and_the_field() -> None:
    with pytest.raises(KeyError, match=r"critic\.update_critic reads returns; the batch holds nothing"):
        BatchFuture(step=1, size=2).slice(range(2), ["returns"], reader="critic.update_critic")

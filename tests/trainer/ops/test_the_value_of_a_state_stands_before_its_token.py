"""Where the values of states stand."""

import torch

from rlhf_trainer.ops.advantages import shift_values


def test_the_value_before_token_t_is_at_position_t_minus_1() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert shift_values(x).tolist() == [[0.0, 1.0, 2.0], [0.0, 4.0, 5.0]]

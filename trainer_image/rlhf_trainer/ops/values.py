"""State values from the output of a value head."""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


def shift_values(x: Float[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """The value head's output at position t - 1, moved to t: the value of the state before token t; position 0 is 0."""
    return pad(x[:, :-1], (1, 0))

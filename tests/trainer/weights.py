"""Whole weights of a sharded model, for tests that compare them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhf_trainer.stored_tensors import read_into
from rlhf_trainer.tensor_slice import TensorSlice
from rlhf_trainer.training.saving import saved_weights
from rlhf_trainer.training.sharding import ShardedModel, held_piece, named_parameters


def full_weights(model: ShardedModel) -> dict[str, Tensor]:
    """Hugging Face name -> whole tensor on the CPU, of each parameter of this rank's stage. A collective."""
    whole = {}
    for name, parameter in named_parameters(model):
        weight = parameter.detach()
        assert isinstance(weight, DTensor)
        whole[name] = weight.full_tensor().cpu().clone()
    return whole


def weights_on_first_rank(model: ShardedModel) -> dict[str, Tensor]:
    """The whole weights of all stages on rank 0; an empty dict on other ranks. A collective."""
    gathered: list[dict[str, Tensor] | None] = [None] * dist.get_world_size()
    mine = full_weights(model)
    is_leader = model.mesh.coordinate("data") == model.mesh.coordinate("tensor") == 0
    dist.all_gather_object(gathered, mine if is_leader else {})
    return {name: weight for each in gathered for name, weight in (each or {}).items()} if dist.get_rank() == 0 else {}


def weights_by_pieces(model: ShardedModel) -> dict[str, Tensor]:
    """The whole weights on rank 0, by the slices that ranks say they hold; an empty dict on others. A collective."""
    every: list[Any] = [None] * dist.get_world_size()
    pieces = {name: (tuple(each.shape), *held_piece(each.detach())) for name, each in named_parameters(model)}
    dist.all_gather_object(every, pieces)
    whole: dict[str, Tensor] = {}
    for held in every if dist.get_rank() == 0 else ():
        for name, (shape, values, place) in held.items():
            tensor = whole.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))
            tensor[place.within(TensorSlice.whole(shape))] = values.cpu()
    return whole


def whole_weights(uri: str) -> dict[str, Tensor]:
    """The weights below an address in a checkpoint, by Hugging Face name."""
    whole = {}
    for name, stored in saved_weights(uri).items():
        whole[name] = torch.empty(stored.shape, dtype=stored.dtype)
        read_into(whole[name], TensorSlice.whole(stored.shape), stored)
    return whole

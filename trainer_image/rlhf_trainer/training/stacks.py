"""Parameters that transformers stacks out of many tensors of a file: the experts of a mixture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from rlhf_trainer.stored_tensors import Layer, TensorSource
from rlhf_trainer.tensor_slice import TensorSlice

Shape = tuple[int, ...]


def place_in_stack(converters: Sequence[WeightConverter], pattern: str, name: str, stack: Shape) -> TensorSlice | None:
    """Which part of a stack [experts, rows, columns] a tensor of a file is; None if it is not stacked so.

    pattern: which of the converters' sources the tensor's name is, with `*` for the number of the expert. The parts of
    one expert lie one below the other, in equal heights.
    """
    (converter,) = (each for each in converters if pattern in each.source_patterns)
    if not _stacks(converter) or len(stack) != 3:
        return None
    found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    assert found, "the converter chose the pattern by this name"
    return _place(int(found[1]), converter.source_patterns.index(pattern), len(converter.source_patterns), stack)


def as_stored(model_type: str, sources: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """The tensors of a model's files by their names there, from its parameters: each stack as what it is made of."""
    conversions = get_checkpoint_conversion_mapping(model_type) or []
    converters = [each for each in conversions if isinstance(each, WeightConverter) and _stacks(each)]
    if not converters:
        return dict(sources)
    renamings = [each.reverse_transform() for each in conversions if isinstance(each, WeightRenaming)]
    return {
        _renamed(renamings, name): tensor
        for parameter, source in sources.items()
        for name, tensor in _unstacked(converters, parameter, source)
    }


def _unstacked(
    converters: Sequence[WeightConverter], name: str, source: TensorSource
) -> Iterator[tuple[str, TensorSource]]:
    converter = next((each for each in converters if name.endswith(each.target_patterns[0])), None)
    if converter is None:
        yield name, source
        return
    (target,), patterns = converter.target_patterns, converter.source_patterns
    for expert, (index, pattern) in product(range(source.shape[0]), enumerate(patterns)):
        own = name.removesuffix(target) + pattern.replace("*", str(expert))
        yield own, Layer(source, _place(expert, index, len(patterns), source.shape))


def _stacks(converter: WeightConverter) -> bool:
    """Whether it stacks the experts, after it has put the matrices of one below each other."""
    kinds = [(type(each), getattr(each, "dim", None)) for each in converter.operations]
    return kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


def _place(expert: int, index: int, count: int, stack: Shape) -> TensorSlice:
    height = stack[1] // count
    return TensorSlice((expert, index * height, 0), (expert + 1, (index + 1) * height, stack[2]))


def _renamed(renamings: Sequence[WeightRenaming], name: str) -> str:
    for renaming in renamings:
        name = renaming.rename_source_key(name)[0]
    return name

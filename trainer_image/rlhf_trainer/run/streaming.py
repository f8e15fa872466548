"""`rollout.stream`: which calls of a step may begin while responses are generated, and the actor that begins them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_planning.step_graph import Call, Graph
from rlhf_trainer.controller.streams import Streams, begin_on

Scorers = Sequence[Sequence[tuple[str, str]]]
"""For each generation of a step, in order, the (model, method) of the calls that score its rows in other pools."""


def scorers_of(graph: Graph) -> Scorers:
    """Those of a step: each reads rows of one generation, and else only what was there before."""
    generations = [call for call in graph.calls if call.in_groups]
    return [[_method(call) for call in graph.calls if _may_begin(graph, call, made)] for made in generations]


def _may_begin(graph: Graph, call: Call, made: Call) -> bool:
    read = [edge for edge in graph.edges if edge.consumer == call.number]
    is_read = any(edge.producer == made.number for edge in read)
    are_there = all(edge.producer <= made.number for edge in read)
    as_added = all(field.name == field.added_as for edge in read for field in edge.fields)
    return call.row_by_row and call.pool != made.pool and is_read and are_there and as_added and not call.arguments


def _method(call: Call) -> tuple[str, str]:
    model, _, method = call.name.partition(".")
    return model, method


class StreamingActor:
    """Stands in a step for an actor, the first of whose responses are scored while others are generated."""

    def __init__(self, actor: Any, models: Mapping[str, Any], scorers: Scorers, streams: Streams) -> None:
        """models: as the worker groups know them."""
        self._actor, self._scorers, self._streams = actor, scorers, streams
        self._models = dict(models)
        self._step, self._generations = 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def generate_sequences(self, batch: Any, **options: Any) -> Any:
        """As the actor does; evaluations, which are of no step, do not stream."""
        if batch.step <= 0:
            return self._actor.generate_sequences(batch, **options)
        self._generations = 0 if batch.step != self._step else self._generations + 1
        self._step = batch.step
        batch = self._actor.generate_sequences(batch, **options)
        for groups in self._streams.groups(batch):
            for model, method in self._scorers[self._generations]:
                begin_on(groups, batch, self._models[model], method)
        return batch

"""`rollout.stream`: which calls of a step may begin while responses are generated, and the actor that begins them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_planning.step_graph import Call, Graph
from rlhf_trainer.controller.streams import Streams, begin_on
from rlhf_trainer.workers.rollout import ROLLOUT_FIELDS

Scorers = Sequence[Sequence[tuple[str, str]]]
"""For each generation of a step, in order, the (model, method) of the calls that score its rows in other pools."""


def scorers_of(graph: Graph) -> Scorers:
    """Those of a step: each reads rows of one generation, and else only what was there before."""
    generations = [call for call in graph.calls if call.in_groups]
    return [[_method(call) for call in graph.calls if _may_begin(graph, call, made)] for made in generations]


def _may_begin(graph: Graph, call: Call, made: Call) -> bool:
    read = [edge for edge in graph.edges if edge.consumer == call.number]
    rows = [field for edge in read if edge.producer == made.number for field in edge.fields]
    are_in_groups = all(field.name == field.added_as and field.name in ROLLOUT_FIELDS for field in rows)
    is_ready = call.row_by_row and not call.arguments and all(edge.producer <= made.number for edge in read)
    return is_ready and call.pool != made.pool and bool(rows) and are_in_groups


def _method(call: Call) -> tuple[str, str]:
    model, _, method = call.name.partition(".")
    return model, method


class StreamingActor:
    """Stands in a step for an actor, the first of whose responses are scored while others are generated."""

    def __init__(self, actor: Any, models: Mapping[str, Any], scorers: Scorers, streams: Streams) -> None:
        """models: as the worker groups know them."""
        self._actor, self._scorers, self._streams = actor, scorers, streams
        self._models = dict(models)
        self._step = 0
        self._left: list[Sequence[tuple[str, str]]] = []
        """The scorers of the generations that this step has still to ask for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def generate_sequences(self, batch: Any, **options: Any) -> Any:
        """As the actor does; evaluations, which are of no step, do not stream."""
        if batch.step <= 0:
            return self._actor.generate_sequences(batch, **options)
        if batch.step != self._step:
            self._step, self._left = batch.step, list(self._scorers)
            self._streams.forget()
        scorers = self._left.pop(0) if self._left else ()  # an own step may generate more often than it did
        batch = self._actor.generate_sequences(batch, **options)
        for groups in self._streams.groups(batch):
            for model, method in scorers:
                begin_on(groups, batch, self._models[model], method)
        return batch

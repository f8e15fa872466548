"""Model that a user names without a manifest: a folder with a config.json, a known name, a hub id, or a size."""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_api.files import read_text
from rlhf_api.problems import Problem, SpecError, suggestion
from rlhf_api.spec.model_shape import HUB_IDS, KNOWN, Shape
from rlhf_mapper.architecture import Architecture
from rlhf_mapper.config_file import ModelConfigError, architecture_in, shape_in, shape_of
from rlhf_planning.numbers import number

SIZE = re.compile(r"(\d+(?:\.\d+)?)([bm])")
NOMINAL = re.compile(r"-(\d+(?:\.\d+)?)([bm])(?=-|$)")
VARIANT = re.compile(r"-(instruct|chat|base|it|hf|pt)(?=-|$)|^meta-")
"""Parts of a hub id's name that do not change the shape."""
UNITS = {"b": 1e9, "m": 1e6}
MAX_RATIO = 1.3
"""Largest ratio of a requested size to the size of the known model that is taken for it."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """Model with its place, its shape as a manifest has it, and a sentence on where the shape is from."""

    uri: str
    shape: Mapping[str, Any]
    architecture: Architecture
    found: str

    @property
    def name(self) -> str:
        """Name in the table of known models, or else of the folder."""
        return str(self.shape.get("name") or self.uri.rpartition("/")[2])


def model_of(text: str) -> NamedModel:
    """Return the model that MODEL names. SpecError for an unknown name, with close ones, or a bad config.json."""
    path, name = Path(text), text.strip().lower()
    if (os.access(path, os.F_OK) and path.is_dir()) or path.name == "config.json":
        return _of_folder(path.parent if path.name == "config.json" else path)
    if size := SIZE.fullmatch(name):
        return _of_size(text, float(size[1]) * UNITS[size[2]])
    if name in KNOWN:
        return _known(name, HUB_IDS[name][0], "")
    if (plain := _plain(name)) not in (by_hub_id := _by_hub_id()) and plain in KNOWN:
        return _known(plain, HUB_IDS[plain][0], f"{text} has the shape of {plain}")
    found = by_hub_id.get(plain)
    if found is None:
        where = "is neither a folder nor one of the table's models, and nothing is fetched"
        hint = f"pass a folder with its config.json, or a size such as 7b; {_close(name)}"
        raise SpecError([Problem(f"MODEL {text}", f"{where}: {hint}")])
    known, owner = found
    hub = text.strip() if "/" in name else f"{owner}/{text.strip()}"
    return _known(known, hub, f"{text} has the shape of {known}")


def _of_folder(folder: Path) -> NamedModel:
    file = folder / "config.json"
    try:
        text = read_text(file, f"MODEL {file}")
        shape, model = shape_in(text), shape_of(text, "actor")
    except ModelConfigError as error:
        raise SpecError([Problem(str(file), str(error))]) from None
    fields = shape.model_dump(by_alias=True, exclude_none=True)
    return NamedModel(uri=folder.absolute().as_uri(), shape=fields, architecture=model, found=f"Its shape is in {file}")


def _of_size(text: str, parameters: float) -> NamedModel:
    """Return the first dense model of the table whose nominal size is nearest."""

    def distance(name: str) -> float:
        named = NOMINAL.search(name)
        size = float(named[1]) * UNITS[named[2]] if named else architecture_in(Shape(name=name), "actor").parameters
        return abs(math.log(size / parameters)) if parameters else math.inf

    nearest = min((name for name in KNOWN if "num_experts" not in KNOWN[name]), key=distance)
    if distance(nearest) > math.log(MAX_RATIO):
        message = f"is far from all dense models of the table; the nearest is {nearest}"
        raise SpecError([Problem(f"MODEL {text}", f"{message}; pass a folder with a config.json")])
    return _known(nearest, HUB_IDS[nearest][0], f"{text} is taken as {nearest}, the nearest dense model of the table")


def _known(name: str, hub: str, found: str) -> NamedModel:
    model = architecture_in(Shape(name=name), "actor")
    return NamedModel(uri=f"hf://{hub}", shape={"name": name}, architecture=model, found=found)


def _by_hub_id() -> dict[str, tuple[str, str]]:
    """Return hub id without VARIANT, with and without its owner -> (name in the table, owner)."""
    ids = {hub: (name, hub.partition("/")[0]) for name, hubs in HUB_IDS.items() for hub in hubs}
    return {_plain(part.lower()): found for hub, found in ids.items() for part in (hub, hub.partition("/")[2])}


def _plain(name: str) -> str:
    owner, slash, rest = name.rpartition("/")
    return owner + slash + VARIANT.sub("", rest)


def _close(name: str) -> str:
    names = {hub.rpartition("/")[2].lower() for hubs in HUB_IDS.values() for hub in hubs}
    hint = suggestion(name.rpartition("/")[2], names.union(KNOWN))
    return hint if hint.startswith("did") else f"the table has {', '.join(list(KNOWN)[:6])} and {len(names) - 6} more"


def size_in_words(model: Architecture) -> str:
    """Return the parameters of a model in words, with those that are active for a token if it has experts."""
    mixed = model.layers - model.dense[0]
    active = model.parameters - mixed * (model.experts - model.experts_per_token) * model.mlp_parameters
    experts = f", of which {number(active)} are active" if model.experts > 1 else ""
    return f"{number(model.parameters)} parameters{experts}"

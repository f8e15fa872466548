"""Data of a job: data sets, the names of their columns, and how much of a row a model sees."""

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag

from rlhf_api.contract import Count, Identifier, Jinja, Listed, Spec, TemplateUri, Text, Uri, form_of, null_is_unset
from rlhf_api.spec.functions import Column, EntryPoint, JsonFields


class Stored(Spec):
    """Address of a stored data set."""

    uri: Uri
    """URI of the data set: hf://, job:// (output of a Generate job), package://, file:// or pvc://claim/."""
    subset: Text | None = Field(None, description="Name of a Hugging Face data set's configuration.")
    split: Text = Field("train", description="Split to read.")


class Rows(Spec):
    """Base of data sets: the names of the columns of their rows."""

    prompt_key: Text = Field("prompt", description="Column of the prompt.")
    response_key: Text = Field("chosen", description="Column of the response, for SFT and KTO.")
    chosen_key: Text = Field("chosen", description="Column of the better response of a pair.")
    rejected_key: Text = Field("rejected", description="Column of the worse response of a pair.")
    chosen_safe_key: Text = "chosen_safe"
    """Column that says whether the better response is safe, for CostModel."""
    rejected_safe_key: Text = "rejected_safe"
    """Column that says whether the worse response is safe, for CostModel."""
    better_key: Text | None = None
    """Column of 0 or 1: 1 where rejectedKey names the better response. Unset: chosenKey always names the better one."""
    label_key: Text = Field("label", description="Column that says whether the response is desirable, for KTO.")
    messages_key: Text | None = None
    """Column of conversations, instead of promptKey and responseKey. SFT and KTO learn each answer of the assistant; RL
    and pairs take everything before the last answer as the prompt.
    """
    tools_key: Text | None = Field(None, description="Column of tools, which the chat template gets.")
    columns: Listed[Column] = Field((), max_length=64)
    """Columns that functions and services get by name; RL only."""
    limit: Count | None = Field(None, description="Largest number of rows to read; unset: all.")

    @property
    def address(self) -> str:
        """Address of the rows: a URI, or an entry point."""
        raise NotImplementedError

    def sources(self, path: str) -> "dict[str, Rows]":
        """Return {path: self}: this is one data set. path: its dotted path in the manifest."""
        return {path: self}

    def map_sources(self, change: "SourceChange") -> "Rows":
        """Return the data set that the function `change` makes of this one."""
        return change(self)


class DataSource(Rows, Stored):
    """A data set and the names of its columns."""

    form: ClassVar = "a data set"

    @property
    def address(self) -> str:
        return self.uri


class OwnRows(Rows, EntryPoint):
    """Rows that a function of the user's returns, and the names of their columns."""

    form: ClassVar = "rows of your own"

    @property
    def address(self) -> str:
        return self.entrypoint


class WeightedSource(DataSource):
    """A data set of a mix, with its share of the mix's rows."""

    weight: float | None = Field(None, gt=0)
    """Weight of the data set; its share is weight / sum of all weights. Unset, in all: an epoch has each row once."""


class SeveralSources(Spec):
    """Several data sets, as a list in the field `key`."""

    form: ClassVar[str]
    key: ClassVar[str]

    def sources(self, path: str) -> dict[str, Rows]:
        """Return dotted path in the manifest, such as `<path>.mix.0`, -> data set. path: the dotted `<path>`."""
        return {f"{path}.{self.key}.{place}": source for place, source in enumerate(getattr(self, self.key))}

    def map_sources(self, change: "SourceChange") -> Self:
        """Return a copy of this list of data sets, with each one replaced by what the function `change` returns."""
        return self.model_copy(update={self.key: tuple(map(change, getattr(self, self.key)))})


class DataMix(SeveralSources):
    """Rows of several data sets: all rows, or exact shares."""

    form, key = "a mix", "mix"

    mix: Listed[WeightedSource] = Field(min_length=1, max_length=64, description="Data sets with their weights.")


class NamedSource(DataSource):
    """One of several data sets for evaluation; its name is the prefix of its measures' names."""

    name: Identifier = Field(description="Name of the data set; its measures are NAME/MEASURE.")


class DataSets(SeveralSources):
    """Several data sets, each measured by itself."""

    form, key = "several data sets", "sets"

    sets: Listed[NamedSource] = Field(min_length=1, max_length=64)
    """Data sets, each measured by itself; RL only."""


SourceChange = Callable[[Rows], Rows]
AnyData = Rows | DataMix | DataSets


def _form_by(several: type[SeveralSources]) -> Callable[[object], str]:
    """Return a function that names the union member for given data: one data set, several, or a function's rows."""
    forms = {several.key: several.form, "entrypoint": OwnRows.form}
    return lambda data: form_of(data, forms, DataSource.form)


SingleData = Annotated[DataSource, Tag(DataSource.form)] | Annotated[OwnRows, Tag(OwnRows.form)]
TrainData = Annotated[
    SingleData | Annotated[DataMix, Tag(DataMix.form)],
    Discriminator(_form_by(DataMix)),
    null_is_unset(DataSource, OwnRows, DataMix),
]
HeldOutData = Annotated[
    SingleData | Annotated[DataSets, Tag(DataSets.form)],
    Discriminator(_form_by(DataSets)),
    null_is_unset(DataSource, OwnRows, DataSets),
]


class Data(Spec):
    """Rows of a job, and how much of a row a model sees."""

    train: TrainData = Field(DataMix.model_construct(mix=()), exclude_if=lambda data: not data.sources(""))
    """The rows to train on: of a data set (uri), of several (mix), or of a function (entrypoint)."""
    order: EntryPoint | None = None
    """A function of your own that orders the rows of an epoch; unset: shuffled by training.seed."""
    pretrain: DataSource | None = None
    """Prompts and responses that the actor also learns to write; PPO, SafeRLHF."""
    min_prompt_tokens: Count = Field(1, description="Shortest prompt; rows with a shorter one are left out.")
    min_response_tokens: Count = 1
    """Shortest response that is read; rows with a shorter one are left out."""
    max_prompt_tokens: Count = Field(1024, description="Longest prompt; for longer ones see overlong.")
    max_response_tokens: Count = Field(1024, description="Longest response, read or generated.")
    overlong: Literal["Drop", "Fail"] = Field("Drop", description="Treatment of a row that is longer than allowed.")
    on_bad_row: Literal["Drop", "Fail"] = "Drop"
    """Treatment of a row that is broken or lacks a column that the job reads."""
    chat_template: TemplateUri = "Auto"
    """Auto: the tokenizer's template, if it has one. Never: none. Else the URI of a template, saved with the model."""
    chat_template_arguments: JsonFields[Identifier] = Field(default_factory=dict)
    """Arguments of the chat template, such as enable_thinking: false."""
    prompt_template: Jinja | None = None
    """Jinja text that a prompt, or its last message, becomes, with {{ prompt }} and columns of the row."""
    system_prompt: Annotated[str, Field(min_length=1, max_length=16384)] | None = None
    """First message, of the role system, of each conversation that has none."""

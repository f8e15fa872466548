"""Low-rank adapters of models."""

from typing import Annotated

from pydantic import Field

from rlhf_api.contract import ABSOLUTE, ONE_PACKAGE, URI, WITHIN_ITSELF, Count, Identifier, Listed, Spec
from rlhf_api.expressions import VALUE, Check

NO_JOB = Check(
    ~VALUE.starts_with("job://"),
    'is "{value}", which is a merged model; name the folder of its adapter, or take it as the uri',
)
AdapterUri = Annotated[str, Field(pattern=URI, max_length=1024), ONE_PACKAGE, WITHIN_ITSELF, NO_JOB, ABSOLUTE]


class Lora(Spec):
    """A low-rank adapter (arXiv:2106.09685): B A alpha / rank is added to frozen weight matrices."""

    rank: Count = Field(16, description="Rank of the adapter: rows of A and columns of B.")
    alpha: Count = Field(32, description="Scale of the adapter: B A counts alpha / rank times.")
    targets: Listed[Identifier] = Field((), max_length=32)
    """Last part of the names of the matrices with an adapter, such as q_proj; empty: all linear layers."""
    initial: AdapterUri | None = None
    """PEFT directory of the adapter from which training starts: hf://, package://, file:// or pvc://claim/."""

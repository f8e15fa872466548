"""Words of verl, OpenRLHF and TRL for fields below spec, for "did you mean"; `<role>` is a trained model."""

from rlhf_api.tables import read_table

_WORDS = read_table(__package__, "foreign_words.yaml", dict[str, str])
MEANT = {word: field for field, words in _WORDS.items() for word in words.split()}
"""Name of a field elsewhere -> the field below spec."""

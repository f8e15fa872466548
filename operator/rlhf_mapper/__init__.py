"""The auto-mapper: which models live on which slots. Pure: dataclasses in, a mapping out."""

"""Data sets: from an address in the manifest to batches of token ids, the same for every rank and every resume."""

"""Workers: the part of each model that one rank runs (SPMD). No module here knows Ray."""

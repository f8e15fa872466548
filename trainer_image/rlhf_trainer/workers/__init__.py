"""What one rank of each model does (SPMD); no module here knows Ray."""

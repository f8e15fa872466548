"""`rlhf import`: manifests from the configurations of verl, OpenRLHF and TRL; a table of keys for each."""

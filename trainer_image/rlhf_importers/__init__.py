"""Importers that convert configurations of verl, OpenRLHF and TRL into manifests, by a table of each project's keys."""

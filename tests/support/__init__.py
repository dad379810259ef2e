"""Test helpers: shells that run commands, groups of ranks, small configurations, simulators, run directories."""

import os

if os.environ.get("FOUNDRY_FIELDS"):
    from support.field_reads import install

    install()

from enum import Enum

import pytest
from omegaconf import OmegaConf

from foundry.config.composition.resolvers import register_resolvers

Method = Enum("Method", ["none", "lora"])


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({"kind": "Llama", "path": None, "method": "none"}, 20),
        ({"kind": "Llama", "method": Method.none}, 20),  # a missing setting is null, an enum is its name
        ({"kind": "GPT", "path": None, "method": "none"}, 1),
        ({"kind": "Llama", "path": "base", "method": "none"}, 1),
        ({"kind": "Llama", "path": None, "method": Method.lora}, 1),
        ({}, 1),
    ],
)
def test_where_all_requires_every_condition(settings, chosen):
    register_resolvers()
    config = OmegaConf.create({**settings, "value": "${where_all:20,1,kind,Llama,path,null,method,none}"})
    assert config.value == chosen

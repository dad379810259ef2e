"""Constraints of vision-language runs are checked at composition time, one line per error."""

import pytest
from support.composition import configure

from foundry.core.errors import ConfigError

VLM = "experiment=vlm_scenes"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["data=scenes", "model=vlm", "objective=sft"],
            "simulator: none is incompatible with data=scenes, which needs a simulator that renders images; "
            "choose one, such as simulator=touch, or data=image_chats",
        ),
        (
            [VLM, "simulator.image_size=null"],
            "simulator.image_size: null is incompatible with data=scenes, which needs a simulator that renders images; "
            "set it, for example to 48",
        ),
        (
            [VLM, "model.image_size=null"],
            "model.image_size: is null but the model reads images; leave it out to follow the data",
        ),
        (
            [VLM, "simulator.image_size=50"],
            "model.image_size: is 50 but must be a multiple of 8, the patch size in pixels; set data.image_size=48",
        ),
        (
            [VLM, "model.image_size=64"],
            "model.image_size: is 64 but must be data.image_size=48; leave it out to follow the data",
        ),
        (
            [VLM, "model.num_images=2"],
            "model.num_images: is 2 but must be data.num_images=1; leave it out to follow the data",
        ),
        (
            [VLM, "model=transformer"],
            "model: is Transformer, which does not read the images of data Scenes; choose model=vlm",
        ),
        (
            [VLM, "objective=next_token"],
            "objective: is NextToken, which needs sequences and tokens, but data is Scenes, which has completions and "
            "images and tokens; change one of them",
        ),
        (
            ["data=arithmetic", "model=vlm", "model.image_size=48", "objective=sft"],
            "model: is PrefixVLM, which needs images and tokens, but data is Arithmetic, which has completions and "
            "sequences and tokens; change one of them",
        ),
        (
            [VLM, "distributed.tensor_parallel=2", "distributed.nproc_per_node=2"],
            "distributed.tensor_parallel: is 2 but model PrefixVLM does not support tensor parallelism; set it to 1, "
            "or choose model=transformer",
        ),
        (
            [VLM, "model.num_heads=3"],
            "model.num_heads: is 3 but must divide model.hidden_size=128 into even head sizes",
        ),
    ],
)
def test_invalid_vlm_settings_are_reported(overrides, expected):
    with pytest.raises(ConfigError) as caught:
        configure(*overrides)
    assert expected in map(str, caught.value.violations)


def test_vlm_sizes_follow_the_simulator_and_the_data():
    config = configure(VLM, "simulator.image_size=64", "data.vocab_size=400", "data.seq_len=80")
    assert (config.data.image_size, config.model.image_size) == (64, 64)
    assert (config.model.vocab_size, config.model.max_seq_len) == (400, 80)
    assert config.model.tie_embeddings

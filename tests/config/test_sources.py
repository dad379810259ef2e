"""Data paths, weights, columns and URLs are checked at composition time."""

from importlib.util import find_spec

import pytest

from foundry.config.schemas.data import TextFiles
from foundry.config.sources import download_hint, hub_hint, refuse_urls
from foundry.core.errors import ConfigError

TEXT = ["data=text", "data.path=[a.txt,b.jsonl]"]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.jsonl"):
        (tmp_path / name).touch()


@pytest.mark.parametrize("data", [["data=text"], ["data=tokens"], ["data=chats", "objective=sft"]])
def test_several_paths_with_weights_compose(compose, data):
    found = compose(*data, "data.path=[a.txt,b.jsonl]", "data.weights=[7,0.5]").data
    assert (list(found.path), list(found.weights)) == (["a.txt", "b.jsonl"], [7.0, 0.5])
    assert list(compose(*data, "data.path=[a.txt]").data.path) == ["a.txt"]


WRONG = {
    "data.weights=[0.7]": r"data\.weights: has 1 number but data\.path has 2 paths; give one number per path",
    "data.weights=[0.7,0]": r"data\.weights: has 0 but must have numbers above 0; to exclude a path, leave it out",
    "data.weights=[0.7,nan]": r"data\.weights: has nan but must have numbers above 0",
    "data.weights=[0.7,inf]": r"data\.weights: has inf but must have numbers above 0",
    "data.weights=[[[1]]]": r"data\.weights: has \[\[1\]\] but must have numbers above 0",
    "data.weights=[]": r"data\.weights: has 0 numbers but data\.path has 2 paths",
    "data.weights=x": r"data\.weights: is x but must be a list",
    "data.path=[a.txt,none.txt]": r"data\.path: has none\.txt, which does not exist; give",
    "data.path=[a.txt,'']": r"data\.path: is \['a\.txt', ''\] but must be a path or a list of paths",
    "data.path=[a.txt,[b.jsonl]]": r"data\.path: is .* but must be a path or a list of paths",
    "data.path=[]": r"data\.path: is \[\] but must be a path or a list of paths",
    "data.path=null": r"data\.path: is null; give a file, folder or glob, or a list of them",
    "data.validation_path=[none.txt]": r"data\.validation_path: has none\.txt, which does not exist; give",
    "data.encoding_errors=ignore": r"data\.encoding_errors: .*strict.*replace",
}


@pytest.mark.parametrize("word", WRONG)
def test_invalid_paths_and_weights_are_rejected(compose, word):
    with pytest.raises(ConfigError, match=WRONG[word]):
        compose(*TEXT, word)


def test_weights_require_several_paths(compose):
    with pytest.raises(ConfigError, match=r"data\.weights: has no effect without several paths"):
        compose("data=text", "data.path=a.txt", "data.weights=[1]")


def test_data_columns_must_be_known(compose):
    words = ["data=chats", "objective=sft", "data.path=b.jsonl"]
    assert compose(*words, "+data.columns={prompt: asked, completion: data.answer}").data.columns.prompt == "asked"
    with pytest.raises(
        ConfigError, match=r"data\.columns: has chosen, which is not a column of this data; choose from messages"
    ):
        compose(*words, "+data.columns={chosen: asked}")
    for called, shown in (("a..b", r"a\.\.b"), ("[1]", r"\[1\]")):
        with pytest.raises(ConfigError, match=rf"data\.columns: has {shown} for prompt but must have column names"):
            compose(*words, f"+data.columns={{prompt: {called}}}")


def test_paths_are_resolved_from_the_start_folder(compose, tmp_path):
    found = compose(*TEXT, "hydra.job.chdir=true").data
    assert list(found.path) == [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]


def test_urls_are_checked_by_protocol_without_network_access(compose):
    words = ["data=text", "data.validation_path=[memory://held/*.jsonl]"]
    assert compose(*words, "data.path=hf://datasets/nobody/nothing").data.path == "hf://datasets/nobody/nothing"
    with pytest.raises(ConfigError, match=r"data\.path: is nowhere://x but Protocol not known: nowhere"):
        compose(*words, "data.path=nowhere://x")
    with pytest.raises(
        ConfigError, match=r"data\.path: has nobody/nothing, which .*; for a dataset of the Hugging Face hub, write"
    ):
        compose(*words, "data.path=[nobody/nothing]")
    for other in (["data=images", "hparams=diffusion"], ["data=image_chats", "objective=sft", "model=vlm"]):
        with pytest.raises(ConfigError, match=r"data\.path: .*memory://x"):
            compose(*other, "data.path=memory://x")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: is memory://x, which does not exist"):
        compose(*words, "data.path=a.txt", "data.tokenizer=memory://x")


def test_missing_file_system_package_is_reported(compose):
    if find_spec("gcsfs") is not None:
        pytest.skip("gcsfs is installed")
    with pytest.raises(ConfigError, match=r"data\.path: is gs://bucket/a\.txt but Please install gcsfs"):
        compose("data=text", "data.path=gs://bucket/a.txt")
    with pytest.raises(
        ConfigError, match=r"checkpoint\.mirror: is gs://bucket/run, .*: Please install gcsfs .*; install"
    ):
        compose("debug=fast", "checkpoint.mirror=gs://bucket/run")


def test_urls_from_a_run_config_require_trust():
    data = TextFiles(path=["a.txt", "memory://x/a.txt"], tokenizer=None)
    with pytest.raises(
        ConfigError, match=r"data\.path: of runs/x is memory://x/a\.txt, which would be downloaded; set t"
    ):
        refuse_urls(data, "runs/x")
    refuse_urls(TextFiles(path="a.txt", tokenizer=None), "runs/x")


HUB = "Qwen/Qwen2.5-0.5B"
MODEL = f"from the Hugging Face hub, download it with hf download {HUB} --local-dir Qwen2.5-0.5B and give Qwen2.5-0.5B"
DATASET = f"download it with hf download {HUB} --repo-type dataset --local-dir Qwen2.5-0.5B and give Qwen2.5-0.5B"
NAMED = {
    "model.path": ["model=base"],
    "model.path of hf": ["model=hf"],
    "model.init_from": [],
    "data.tokenizer": ["data=text", "data.path=a.txt"],
    "objective.teacher": ["objective=distillation", "data=arithmetic"],
    "model.backbone.init_from": [
        "hparams=policy",
        "model=vla",
        "simulator.image_size=48",
        "data.instruction_tokens=24",
    ],
}


@pytest.mark.parametrize("name", NAMED)
def test_hub_model_name_error_shows_the_download_command(compose, name):
    key = name.partition(" ")[0]
    with pytest.raises(ConfigError) as refused:
        compose(*NAMED[name], f"{key}={HUB}")
    lines = str(refused.value).splitlines()
    assert [line for line in lines if line.startswith(f"{key}: is {HUB}, which") and line.endswith(MODEL)]


@pytest.mark.parametrize("words", [["hparams=policy", "data=lerobot"], ["hparams=diffusion", "data=images"]])
def test_hub_dataset_name_error_shows_the_download_command(compose, words):
    with pytest.raises(ConfigError, match=DATASET.replace(".", r"\.")):
        compose(*words, f"data.path={HUB}")


@pytest.mark.parametrize(
    ("path", "is_name"),
    [
        (HUB, True),
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("gpt2", False),
        ("data/a.txt", False),
        ("chats/rows.jsonl", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("./a/b", False),
        ("../b", False),
        ("~/models", False),
        ("there/new", False),
    ],
)
def test_hub_hints_require_the_form_owner_slash_name(path, is_name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert bool(download_hint(path)) == is_name
    assert bool(hub_hint(path)) == is_name
